"""Training and evaluation text that any machine has: word problems, JSON records, Python source.

Everything is drawn from a `random.Random`, so a seed names a prompt. Held-out word problems and
records never occur in training. `is_held_out` splits by a hash of the *prompt*, so the split does
not depend on how many examples were drawn. Source files are split by file name.
"""

from __future__ import annotations

import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.tiny.prompts import Example

NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kira Leo Mia Noah Olga Paul Rita Sam Tara Umar "
    "Vera Will Yara Zoe"
).split()
ITEMS = "apples books coins cards shells stamps pens marbles stickers cookies eggs roses".split()
BOXES = ["boxes", "bags", "baskets", "jars", "trays"]
CITIES = "Oslo Lima Rome Cairo Delhi Paris Quito Seoul Tokyo Accra Perth Dublin".split()
COLOURS = ["red", "blue", "green", "black", "white", "silver"]
SURNAMES = "Lopez Stone Berg Okoye Tanaka Weber Rossi Novak Silva Haddad Moore Lind".split()


def is_held_out(text: str) -> bool:
    """True for 1 text in 16. These texts are only for evaluation."""
    return zlib.crc32(text.encode()) % 16 == 0


# ---------------------------------------------------------------------------------------------
# Word problems: a question, one sentence of working per step, "The answer is N."


def _collection(rng: random.Random) -> tuple[str, str, int]:
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    have = rng.randint(5, 40)
    question = [f"{name} has {have} {item}."]
    work = [f"{name} starts with {have} {item}."]
    for _ in range(rng.randint(2, 3)):
        asked, worked, have = _move(rng, name, friend, item, have)
        question.append(asked)
        work.append(worked)
    question.append(f"How many {item} does {name} have now?")
    return " ".join(question), " ".join(work), have


def _move(rng: random.Random, name: str, friend: str, item: str, have: int) -> tuple[str, str, int]:
    """A change of a collection: its text, its working, and the new number of items."""
    moves = ["buys", "gets"]
    if have > 6:
        moves += ["loses", "gives"]
    if have <= 25:
        moves.append("times")
    move = rng.choice(moves)
    n = rng.randint(2, 30)
    if move in ("buys", "gets"):
        if move == "buys":
            asked, after = f"Then {name} buys {n} more {item}.", f"After buying {n} more"
        else:
            asked = f"{friend} gives {name} {n} {item}."
            after = f"After {friend} gives {n} {item}"
        return asked, f"{after}, {name} has {have} + {n} = {have + n} {item}.", have + n
    if move in ("loses", "gives"):
        n = rng.randint(2, have - 2)
        if move == "loses":
            asked, after = f"Then {name} loses {n} {item}.", f"After losing {n}"
        else:
            asked = f"{name} gives {n} {item} to {friend}."
            after = f"After giving {n} {item} to {friend}"
        return asked, f"{after}, {name} has {have} - {n} = {have - n} {item}.", have - n
    n = rng.randint(2, 4)
    word = {2: "doubles", 3: "triples", 4: "quadruples"}[n]
    asked, after = f"Then {name} {word} the number of {item}.", f"After {name} {word} the number"
    return asked, f"{after}, {name} has {have} * {n} = {have * n} {item}.", have * n


def _shopping(rng: random.Random) -> tuple[str, str, int]:
    name = rng.choice(NAMES)
    one, two = rng.sample(ITEMS, 2)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    p, q = rng.randint(2, 12), rng.randint(2, 12)
    total = a * p + b * q
    question = f"{name} buys {a} {one} for {p} dollars each and {b} {two} for {q} dollars each. "
    work = (
        f"The {a} {one} cost {a} * {p} = {a * p} dollars. "
        f"The {b} {two} cost {b} * {q} = {b * q} dollars. "
        f"Together they cost {a * p} + {b * q} = {total} dollars."
    )
    if rng.random() < 0.5:
        return question + f"How many dollars does {name} pay?", work, total
    paid = total + rng.randint(1, 40)
    question += f"{name} pays with {paid} dollars. How many dollars does {name} get back?"
    work += f" {name} gets back {paid} - {total} = {paid - total} dollars."
    return question, work, paid - total


def _packing(rng: random.Random) -> tuple[str, str, int]:
    name = rng.choice(NAMES)
    item, box = rng.choice(ITEMS), rng.choice(BOXES)
    a, b = rng.randint(3, 12), rng.randint(2, 12)
    total = a * b
    question = f"{name} has {a} {box} with {b} {item} in each. "
    work = f"In the {a} {box} there are {a} * {b} = {total} {item}."
    if rng.random() < 0.5:
        n = rng.randint(2, total - 2)
        question += f"{n} of the {item} are sold. How many {item} are left?"
        work += f" After {n} are sold, there are {total} - {n} = {total - n} {item}."
        return question, work, total - n
    n = rng.randint(2, 40)
    question += f"Another {n} {item} lie on the table. How many {item} are there in all?"
    work += f" With the {n} on the table, there are {total} + {n} = {total + n} {item}."
    return question, work, total + n


def _reading(rng: random.Random) -> tuple[str, str, int]:
    name = rng.choice(NAMES)
    a, days = rng.randint(3, 12), rng.randint(2, 9)
    pages = a * days + rng.randint(2, 60)
    question = (
        f"{name} reads {a} pages a day for {days} days. The book has {pages} pages. "
        f"How many pages does {name} still have to read?"
    )
    work = (
        f"In {days} days {name} reads {a} * {days} = {a * days} pages. "
        f"Of the {pages} pages, {pages} - {a * days} = {pages - a * days} pages are left."
    )
    return question, work, pages - a * days


def _comparing(rng: random.Random) -> tuple[str, str, int]:
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    a, n = rng.randint(10, 60), rng.randint(2, 40)
    if rng.random() < 0.5 and n < a - 1:
        other = a - n
        question = f"{name} has {a} {item}. {friend} has {n} fewer {item} than {name}. "
        work = f"{friend} has {a} - {n} = {other} {item}."
    else:
        other = a + n
        question = f"{name} has {a} {item}. {friend} has {n} more {item} than {name}. "
        work = f"{friend} has {a} + {n} = {other} {item}."
    question += f"How many {item} do {name} and {friend} have together?"
    work += f" Together {name} and {friend} have {a} + {other} = {a + other} {item}."
    return question, work, a + other


def _sharing(rng: random.Random) -> tuple[str, str, int]:
    name = rng.choice(NAMES)
    item, box = rng.choice(ITEMS), rng.choice(BOXES)
    each, n = rng.randint(2, 12), rng.randint(2, 9)
    extra = rng.randint(2, 20)
    total = each * n
    question = (
        f"{name} has {total + extra} {item} and keeps {extra} of them. The rest go into {n} {box}, "
        f"the same number in each. How many {item} are in each of the {box}?"
    )
    work = (
        f"After keeping {extra}, {total + extra} - {extra} = {total} {item} are left. "
        f"In each of the {n} {box} there are {total} / {n} = {each} {item}."
    )
    return question, work, each


PROBLEMS: tuple[Callable[[random.Random], tuple[str, str, int]], ...] = (
    _collection,
    _collection,
    _shopping,
    _packing,
    _reading,
    _comparing,
    _sharing,
)


def word_problem(rng: random.Random) -> Example:
    question, work, answer = rng.choice(PROBLEMS)(rng)
    return Example("word", question, f"{work} The answer is {answer}.", answer)


# ---------------------------------------------------------------------------------------------
# JSON records: a schema, the facts in prose, the record


def final_answer(text: str) -> int | None:
    """The number after the last "The answer is", or None."""
    _, found, tail = text.rpartition("The answer is ")
    number = tail.split(".")[0].strip()
    return int(number) if found and number.isdigit() else None


def _person(rng: random.Random) -> tuple[dict[str, Any], str]:
    name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    age, city = rng.randint(18, 90), rng.choice(CITIES)
    hobbies = rng.sample(["chess", "music", "tennis", "cooking", "hiking", "poetry"], 2)
    record = {"name": name, "age": age, "city": city, "hobbies": hobbies}
    text = f"{name} is {age} years old, lives in {city} and likes {hobbies[0]} and {hobbies[1]}."
    return record, text


def _product(rng: random.Random) -> tuple[dict[str, Any], str]:
    what = rng.choice(["lamp", "chair", "table", "clock", "radio", "kettle"])
    colour, price, stock = rng.choice(COLOURS), rng.randint(5, 300), rng.randint(0, 90)
    sale = rng.random() < 0.5
    record = {"product": what, "colour": colour, "price": price, "stock": stock, "on_sale": sale}
    state = "is on sale" if sale else "is not on sale"
    text = f"The {colour} {what} costs {price} dollars, {state}, and {stock} are in stock."
    return record, text


def _trip(rng: random.Random) -> tuple[dict[str, Any], str]:
    start, end = rng.sample(CITIES, 2)
    name, day, seats = rng.choice(NAMES), rng.randint(1, 28), rng.randint(1, 6)
    record = {"from": start, "to": end, "day": day, "passenger": name, "seats": seats}
    text = f"{name} travels from {start} to {end} on day {day} and books {seats} seats."
    return record, text


def _order(rng: random.Random) -> tuple[dict[str, Any], str]:
    name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    number = rng.randint(100, 999)
    lines = [{"item": i, "count": rng.randint(1, 20)} for i in rng.sample(ITEMS, rng.randint(1, 2))]
    record = {"order": number, "customer": name, "items": lines}
    what = " and ".join(f"{line['count']} {line['item']}" for line in lines)
    text = f"Order {number} is from {name} for {what}."
    return record, text


RECORDS: tuple[Callable[[random.Random], tuple[dict[str, Any], str]], ...] = (
    _person,
    _product,
    _trip,
    _order,
)


def json_record(rng: random.Random) -> Example:
    record, text = rng.choice(RECORDS)(rng)
    prompt = f"Write a JSON record with the fields {', '.join(record)}. {text}"
    return Example("json", prompt, json.dumps(record), record)


# ---------------------------------------------------------------------------------------------
# Python source: the standard library of the running interpreter


def source_files() -> list[Path]:
    """Every module of the standard library except tests and vendored packages, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "_vendor"}
    return sorted(f for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts))


def functions(held_out: bool) -> Iterator[str]:
    """Top-level blocks (a function, a class or a run of statements) of at least 200 characters."""
    for path in source_files():
        if is_held_out(path.name) != held_out:
            continue
        block: list[str] = []
        for line in path.read_text(errors="ignore").splitlines(keepends=True):
            if (
                line.startswith(("def ", "class ", "@", "async def "))
                and sum(map(len, block)) > 200
            ):
                yield "".join(block)
                block = []
            block.append(line)
        if sum(map(len, block)) > 200:
            yield "".join(block)


@cache
def code_prompts() -> list[Example]:
    """Held-out source to continue: the first 6 lines of a block that starts with def or class.

    Some modules repeat code of others. A beginning that also occurs in training is left out.
    """
    trained = "".join(functions(held_out=False))
    found = []
    for block in functions(held_out=True):
        lines = block.splitlines(keepends=True)
        opening = "".join(lines[:6])
        if block.startswith(("def ", "class ")) and len(lines) > 12 and opening not in trained:
            found.append(Example("code", opening, "".join(lines[6:])))
    return found


# ---------------------------------------------------------------------------------------------


def draw_held_out(kind: str, count: int, seed: int = 0) -> list[Example]:
    """`count` held-out examples of a kind, fixed by the seed. For code, at most all that exist."""
    rng = random.Random(f"{kind}-{seed}")
    if kind == "code":
        prompts = code_prompts()
        return rng.sample(prompts, min(count, len(prompts)))
    draw = {"word": word_problem, "json": json_record}[kind]
    found: dict[str, Example] = {}
    while len(found) < count:
        example = draw(rng)
        if is_held_out(example.prompt):
            found[example.prompt] = example
    return list(found.values())
