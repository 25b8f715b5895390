"""Hypothesis strategies that damage the folder of a sound draft: configs, headers, tensors, files.

A `Damage` changes the files of a folder, which are bytes by name. A few replace a file by something
else, such as a pipe, and leave a `Path -> None` function in its place.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from hypothesis import strategies as st

from test.formats import CASES, write

Content: TypeAlias = bytes | Callable[[Path], object]
Folder: TypeAlias = dict[str, Content]
Damage: TypeAlias = Callable[[Folder], None]

CONFIG, WEIGHTS, MASK = "config.json", "model.safetensors", "mask_embedding.pt"
INDEX = "model.safetensors.index.json"
# One draft of each format, with each part beside the layers.
DRAFTS = (
    "zlab sliding",
    "zlab yarn of Kimi",
    "zlab llama3",
    "zlab mask embedding in a dict",
    "SpecForge",
    "speculators draft vocabulary",
    "speculators sliding",
    "DeepSpec rnn",
    "SpecForge DSpark gated",
    "speculators DSpark draft vocabulary",
    "DFlash 2 sliding, cap, scale",
    "speculators DFlash 2",
    "DSpine sliding, cap, padded vocabulary",
    "DSpine of Tencent",
    "LiLiCorr convolved, padded vocabulary",
    "Domino normalised",
    "Domino mask embedding",
)
# Fields that a sound draft may lack.
OTHER_FIELDS = (
    *("quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "num_target_layers"),
    *("target_hidden_size", "sample_from_anchor", "is_causal", "hidden_act", "rms_norm_eps"),
    *("speculators_model_type", "projector_type", "markov_rank", "selector_top_k", "architectures"),
    *(
        "dflash_config",
        "dspark_config",
        "dspine_config",
        "causal_head",
        "use_swa",
        "draft_vocab_size",
        "use_gate",
    ),
)
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
NUMBERS = (
    *(-1, 0, 1, 2, 3, 5, 7, 8, 16, 64, 150, 160, 1000, 2**31 - 1, 2**31, 10**9, 10**12, 10**400),
    *(0.5, 1.0, -0.0, 1e-320, 1e38, 1e308, float("inf"), float("-inf"), float("nan")),
)
STRANGE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "../../etc/passwd",
        "\ud800",
        "a\nb\x1b[31m\u202e",
        "x" * 100_000,
    ),
    *([], {}, [[]], [{}], [None], [1] * 100_000, DEEP, {"a": {"b": 1}}, {"rope_type": "yarn"}),
    *({"rope_type": "dynamic", "rope_theta": 1e4}, {"quant_method": "fp8"}, {"quant_method": []}),
    *(["sliding_attention"] * 2, ["full_attention"] * 2, ["x"] * 2, [0, 2], [2, 0], [0, 10**9]),
)
# A copy each time, because a second change may be inside of it.
values = st.one_of(*(st.sampled_from(list(map(json.dumps, v))) for v in (NUMBERS, STRANGE))).map(
    json.loads
)
SIZES = (-1, 0, 1, 2, 63, 64, 65, 2**31, 2**32, 2**63, 2**64, 10**30, 1.0, True, None, "64", [64])
DTYPES = ("F32", "F64", "F16", "BF16", "F8_E4M3", "F4", "C64", "I64", "I8", "U8", "BOOL", "X", 7)
NAMES = (
    "",
    "../x",
    "/etc/passwd",
    "a\nb",
    "\ud800",
    "x" * 70_000,
    "model.norm.weight",
    "t2d",
    "d2t",
)


@cache
def sound(case: str) -> dict[str, bytes]:
    """The files of a sound draft."""
    config, weights, _ = CASES[case]()
    with TemporaryDirectory() as folder:
        path = write(Path(folder), config, weights)
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def write_folder(folder: Path, files: Folder) -> None:
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)


def _changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes cut off, put in, or replaced."""
    at = draw(st.integers(0, len(content)))
    new = draw(st.binary(max_size=12))
    put_in, replaced = (
        content[:at] + new + content[at:],
        content[:at] + new + content[at + len(new) :],
    )
    return draw(st.sampled_from([content[:at], content[at:], put_in, replaced]))


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every field and entry inside a JSON value."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    found = []
    for key, part in inner:
        found += [(*place, key), *_places(part, (*place, key))]
    return found


def _get(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value.get(key) if isinstance(value, dict) else value[key]
    return value


def _put(value: Any, place: tuple[Any, ...], new: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


@st.composite
def configs(draw: st.DrawFn) -> Damage:
    """Fields of config.json that have another value, or that are new."""

    def damage(files: Folder) -> None:
        config = json.loads(_bytes(files, CONFIG))
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.sampled_from(_places(config) + [(name,) for name in OTHER_FIELDS]))
            _put(config, place, draw(values | _alike(_get(config, place))))
        files[CONFIG] = json.dumps(config).encode()

    return damage


def _alike(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type, which get further than others."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([0, 1, 2, value - 1, value + 1, 2 * value, value // 2, 10**9])
    if isinstance(value, float):
        return st.floats()
    if isinstance(value, list):
        return st.permutations(value) | st.just(value[1:]) | st.just(value + value)
    return st.none()


@st.composite
def texts(draw: st.DrawFn) -> Damage:
    """A config.json that is hardly JSON, an index, or files that SGLang opens by itself."""

    def damage(files: Folder) -> None:
        config = _bytes(files, CONFIG)
        twice = config[:-1] + b', "block_size": 8, "hidden_size": 64, "block_size": 9}'
        broken = st.sampled_from(
            [
                b"",
                b"[]",
                b"7",
                b"[" * 100_000,
                b'{"a":' * 5000 + b"1" + b"}" * 5000,
                b"\xff\xfe" + config,
                b"\xef\xbb\xbf" + config,
                config.decode().encode("utf-16"),
                config[:-1] + b', "x": ' + b"9" * 5000 + b"}",
                config + b" " * 5_000_000,
                twice,
            ]
        )
        content = draw(broken | st.just(_changed_bytes(draw, config)))
        files[draw(st.sampled_from([CONFIG, CONFIG, INDEX, "generation_config.json"]))] = content

    return damage


@st.composite
def indexes(draw: st.DrawFn) -> Damage:
    """An index that names other files."""
    strange = ("../model.safetensors", "/etc/passwd", "", ".", "gone.safetensors", WEIGHTS, 7, [1])
    named = draw(st.lists(st.sampled_from(strange), max_size=3))
    maps: tuple[Any, ...] = ({f"t{i}": name for i, name in enumerate(named)}, named, None, 7)
    index = {"weight_map": draw(st.sampled_from(maps))}
    return lambda files: files.update({INDEX: json.dumps(index).encode()})


@st.composite
def headers(draw: st.DrawFn) -> Damage:
    """A header that describes other tensors, or whose length is another."""

    def damage(files: Folder) -> None:
        content = _bytes(files, WEIGHTS)
        [length] = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        names = st.sampled_from(sorted(header))
        for name in draw(st.lists(names, min_size=1, max_size=2, unique=True)):
            _change_entry(draw, header, name)
        text = json.dumps(header).encode()
        stated = draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) - 1, 2**40, 2**64 - 1]))
        files[WEIGHTS] = struct.pack("<Q", stated) + text + data

    return damage


def _change_entry(draw: st.DrawFn, header: dict[str, Any], name: str) -> None:
    entry = header[name] if isinstance(header[name], dict) else {}
    shape, offsets = entry.get("shape", [1]), entry.get("data_offsets", [0, 1])
    size = draw(st.sampled_from(SIZES))
    change = draw(st.sampled_from(["dtype", "shape", "offsets", "name", "gone", "all"]))
    if change == "dtype":
        entry["dtype"] = draw(st.sampled_from(DTYPES))
    elif change == "shape":
        entry["shape"] = draw(st.sampled_from([[size], [*shape, size], [*shape, 1], [], size]))
    elif change == "offsets":
        entry["data_offsets"] = draw(
            st.sampled_from([[size, offsets[1]], [offsets[0], size], offsets[::-1], [size], size])
        )
    elif change == "name":
        header[draw(st.sampled_from(NAMES))] = header.pop(name)
    elif change == "gone":
        del header[name]
    else:
        header[name] = draw(values)


@st.composite
def tensors(draw: st.DrawFn) -> Damage:
    """Other values of a tensor, all of them or a few bytes."""

    def damage(files: Folder) -> None:
        content = bytearray(_bytes(files, WEIGHTS))
        [length] = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        entry = header[draw(st.sampled_from(sorted(header)))]
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        patterns = [b"\x00", b"\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"]
        new = draw(st.sampled_from(patterns) | st.binary(min_size=1, max_size=8))
        whole = draw(st.booleans())
        count = end - start if whole else min(len(new), end - start)
        at = start if whole else draw(st.integers(start, end - count))
        content[at : at + count] = (new * (count // len(new) + 1))[:count]
        files[WEIGHTS] = bytes(content)

    return damage


@st.composite
def blobs(draw: st.DrawFn) -> Damage:
    """Some bytes of the binary files changed, or a mask embedding that is another object."""

    def damage(files: Folder) -> None:
        name = draw(st.sampled_from(sorted({WEIGHTS, MASK} & files.keys())))
        files[name] = _changed_bytes(draw, _bytes(files, name))

    return damage


@st.composite
def places(draw: st.DrawFn) -> Damage:
    """Something else in the place of a file: a link, a pipe, a folder, or nothing."""
    names = (CONFIG, WEIGHTS, MASK, INDEX, "generation_config.json", "hf_quant_config.json")
    instead: tuple[Callable[[Path], object] | None, ...] = (
        None,
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("gone"),
    )
    name, thing = draw(st.sampled_from(names)), draw(st.sampled_from(instead))

    def damage(files: Folder) -> None:
        if thing is None:
            files.pop(name, None)
        else:
            files[name] = thing

    return damage


def _bytes(files: Folder, name: str) -> bytes:
    content = files[name]
    assert isinstance(content, bytes)
    return content


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    """The folder of a draft whose config, weights, both or another file are damaged."""
    files: Folder = dict(sound(draw(st.sampled_from(DRAFTS))))
    which = draw(st.sampled_from(["config", "config", "weights", "weights", "both", "places"]))
    if which in ("config", "both"):
        draw(configs() | configs() | configs() | texts())(files)
    if which in ("weights", "both"):
        draw(headers() | tensors() | tensors() | blobs() | indexes())(files)
    if which == "places":
        draw(places())(files)
    return files
