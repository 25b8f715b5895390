"""Hostile files of a checkpoint, by name: what each is refused for, and what none of them does."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflash.checkpoint import load_config, read_draft
from sglang_dflash.checkpoint.files import CONFIG_LIMIT, JSON_LIMIT
from sglang_dflash.checkpoint.fit import defects
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.checkpoint.tensors import HEADER_LIMIT, Tensors
from sglang_dflash.errors import LONGEST, Refusal
from sglang_dflash.tiny import DRAFT, TARGET
from sglang_dflash.tools.cli import main
from sglang_dflash.tools.inspect import inspect
from test.checkpoints import HIDDEN, MASK, draft_config, draft_weights, write_draft

INDEX = "model.safetensors.index.json"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A sound draft in a folder of its own."""
    config = draft_config()
    return write_draft(tmp_path / "draft", config, draft_weights(config))


def refusal_of(draft: Path) -> str:
    """The paragraph of a draft that cannot be read, or that has a defect."""
    text = str(inspect(str(draft), None).problems[0])
    assert text.isprintable()
    assert len(text) < 3 * LONGEST
    return text


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_opened(draft: Path, tmp_path: Path, name: str) -> None:
    (draft / "model.safetensors").unlink()
    (draft / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    text = refusal_of(draft)
    assert f"weights as pickles (['{name}'])" in text
    assert "Convert them to safetensors" in text
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("how", ["plain", "torch.save"])
def test_a_mask_embedding_runs_no_code(draft: Path, tmp_path: Path, how: str) -> None:
    trap, file = Trap(tmp_path / "sprung"), draft / "mask_embedding.pt"
    if how == "plain":
        file.write_bytes(pickle.dumps(trap))
    else:
        torch.save({"mask": torch.zeros(HIDDEN), "other": trap}, file)
    with pytest.raises(Refusal, match=r"mask_embedding\.pt cannot be read"):
        read_mask_embedding(load_config(draft))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_sound_mask_embedding_is_read(draft: Path, dtype: torch.dtype) -> None:
    vector = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)[1]
    for value in (vector, vector[None], {"embedding": vector, "mask_token_id": MASK}):
        torch.save(value, draft / "mask_embedding.pt")
        read = read_mask_embedding(load_config(draft))
        assert read.dtype == dtype
        assert torch.equal(read, vector)


MASKS: dict[str, Callable[[Path], object]] = {
    "a size that is not in the file": lambda file: torch.save(torch.zeros(10**6), file),
    "not a number": lambda file: torch.save(torch.full((HIDDEN,), float("nan")), file),
    "gigabytes of zeros": lambda file: torch.save({"x": bytearray(10)}, file),
    "an older format": lambda file: torch.save(
        torch.zeros(HIDDEN), file, _use_new_zipfile_serialization=False
    ),
    "a view of one value": lambda file: torch.save(torch.zeros(1).expand(10**9), file),
}


@pytest.mark.parametrize("what", MASKS)
def test_other_mask_embeddings_are_refused(draft: Path, what: str) -> None:
    MASKS[what](draft / "mask_embedding.pt")
    with pytest.raises(Refusal, match=r"mask_embedding\.pt"):
        read_mask_embedding(load_config(draft))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX, "mask_embedding.pt"])
def test_a_link_out_of_the_folder(draft: Path, tmp_path: Path, name: str) -> None:
    """Also to a sound file, because the content of any file could be shown in a message."""
    (tmp_path / "outside").write_text('{"secret": 1}')
    (draft / name).unlink(missing_ok=True)
    (draft / name).symlink_to("../outside")
    text = refusal_of(draft)
    assert f"{name} is a link that leads out of its folder" in text
    assert "secret" not in text


def test_links_of_the_hubs_cache(draft: Path, tmp_path: Path) -> None:
    """snapshots/<revision>/<name> -> ../../blobs/<hash>, and links to folders, are as good."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in draft.iterdir():
        file.rename(blobs / f"hash of {file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash of {file.name}")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert read_draft(folder)[1].known
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../draft.json")
    assert "leads out of its folder" in refusal_of(snapshot)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX, "mask_embedding.pt"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_no_file(draft: Path, name: str, kind: str) -> None:
    """Opening a pipe would wait for a writer."""
    (draft / name).unlink(missing_ok=True)
    make: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "loop": lambda path: path.symlink_to(name),
    }
    make[kind](draft / name)
    started = time.monotonic()
    assert name in refusal_of(draft)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("named", ["../../etc/passwd", "/etc/passwd", "", 7, ["x"], None])
def test_paths_in_an_index(draft: Path, named: Any) -> None:
    (draft / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": named}}))
    assert "which is missing in its folder" in refusal_of(draft)


def test_files_that_the_index_does_not_name(draft: Path) -> None:
    """SGLang does not load them, so they are not read here, either."""
    (draft / "other.safetensors").write_bytes(b"no safetensors")
    assert "other.safetensors" in refusal_of(draft)
    (draft / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    assert read_draft(draft)[1].known


def test_a_tensor_twice(draft: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, draft / "other.safetensors")
    assert "holds the tensor norm.weight twice" in refusal_of(draft)


def test_a_modelopt_draft(draft: Path) -> None:
    (draft / "hf_quant_config.json").write_text("{}")
    assert "SGLang would quantise" in refusal_of(draft)


def with_header(draft: Path, header: bytes, data: int = 0, length: int | None = None) -> None:
    stated = struct.pack("<Q", len(header) if length is None else length)
    (draft / "model.safetensors").write_bytes(stated + header + bytes(data))


@pytest.mark.parametrize("length", [HEADER_LIMIT + 1, 2**63, 2**64 - 1])
def test_a_huge_header_length(draft: Path, length: int) -> None:
    with_header(draft, b"{}", length=length)
    assert "header has more than 16,000,000 bytes" in refusal_of(draft)


HEADERS: dict[str, tuple[dict[str, Any], int]] = {
    "overlap": (
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        12,
    ),
    "negative": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, 4),
    "product": ({"a": {"dtype": "U8", "shape": [2**33, 2**33], "data_offsets": [0, 4]}}, 4),
    "beyond": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 4),
    "dtype": ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, 4),
    "no object": ({"a": []}, 0),
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_describe_no_file(draft: Path, what: str) -> None:
    header, data = HEADERS[what]
    with_header(draft, json.dumps(header).encode(), data)
    assert "is not a complete safetensors file" in refusal_of(draft)


def test_a_tensor_without_rows(draft: Path) -> None:
    config = draft_config()
    for shape in ((0, HIDDEN), ()):
        write_draft(draft, config, draft_weights(config) | {"lm_head.weight": torch.zeros(shape)})
        assert "lm_head.weight" in refusal_of(draft)


CONFIGS: dict[str, bytes] = {
    "has more than 4,000,000 bytes": b"{" + b" " * CONFIG_LIMIT + b"}",
    "lists and objects inside each other": b'{"a":' + b"[" * 100 + b"]" * 100 + b"}",
    "inside each other": b'{"a":' * 100_000,
    "states a key twice": b'{"a": 1, "a": 2}',
    "Exceeds the limit": b'{"a": ' + b"9" * 5000 + b"}",
    "codec can't decode": b'{"a": "\xff"}',
    "utf-8": json.dumps(draft_config()).encode("utf-16"),
    "Unexpected UTF-8 BOM": b"\xef\xbb\xbf" + json.dumps(draft_config()).encode(),
    "not a JSON object": b"[1]",
    "must be a list of names": b'{"architectures": {"DFlashDraftModel": 1}}',
}


@pytest.mark.parametrize("words", CONFIGS)
def test_configs(draft: Path, words: str) -> None:
    (draft / "config.json").write_bytes(CONFIGS[words])
    assert words in refusal_of(draft)


YARN = {"rope_type": "yarn", "factor": 4.0}
FIELDS: dict[str, dict[str, Any]] = {
    "block_size = 1000000000": {"block_size": 10**9},
    "num_hidden_layers = 1000000000": {"num_hidden_layers": 10**9},
    "vocab_size = 1000000000000": {"vocab_size": 10**12},
    "num_target_layers = 100000": {"num_target_layers": 10**5},
    "num_target_layers = 2, which are too few": {
        "num_target_layers": 2,
        "dflash_config": {"target_layer_ids": None},
    },
    "must be at most 1000": {"dflash_config": {"target_layer_ids": [0, 10**6]}},
    "sliding_window = 1000000000000": {"sliding_window": 10**12},
    "rms_norm_eps = nan": {"rms_norm_eps": float("nan")},
    "rms_norm_eps = -1e-06": {"rms_norm_eps": -1e-6},
    "rope_theta = inf": {"rope_theta": float("inf")},
    "no rope_theta above 1": {"rope_theta": 1},
    "has factor = 'four'": {"rope_scaling": YARN | {"factor": "four"}},
    "has no factor": {"rope_scaling": {"rope_type": "linear"}},
    "mscale = -1.0": {"rope_scaling": YARN | {"mscale": -1.0}},
    "rope_type = [1]": {"rope_scaling": {"rope_type": [1]}},
    "partial_rotary_factor = 0.5": {"rope_scaling": {"partial_rotary_factor": 0.5}},
    "names no quant_method": {"quantization_config": {}},
    "the config describes": {
        "quantization_config": {"quant_method": "fp8"},
        "intermediate_size": 10**9,
    },
    "The weights do not fit the config": {"intermediate_size": 10**9},
}


@pytest.mark.parametrize("words", FIELDS)
def test_sizes_that_no_file_holds(draft: Path, words: str) -> None:
    (draft / "config.json").write_text(json.dumps(draft_config(**FIELDS[words])))
    assert words in refusal_of(draft)


def test_heads_of_no_size(draft: Path) -> None:
    config = draft_config(head_dim=None, num_attention_heads=65, num_key_value_heads=65)
    (draft / "config.json").write_text(json.dumps(config))
    read, tensors = read_draft(draft, headers=Tensors(draft))
    assert "65 heads of size 0" in defects(read, tensors, read.draft_width)[0].what


def test_a_long_table_of_rope_is_made_when_it_is_served(draft: Path) -> None:
    """`max_position_embeddings` is no limit, so it may be any number."""
    config = draft_config(max_position_embeddings=2**31 - 1)
    (draft / "config.json").write_text(json.dumps(config))
    assert load_config(draft).max_position_embeddings == 2**31 - 1


TARGETS: dict[str, dict[str, Any]] = {
    "hidden_size = True": {"hidden_size": True},
    "vocab_size = 1e+40": {"vocab_size": 1e40},
    "num_hidden_layers = -1": {"num_hidden_layers": -1},
    "layer_types = 7": {"layer_types": 7},
    "layer_types = [[]]": {"layer_types": [[]]},
    "model_type = {}": {"model_type": {}},
}


@pytest.mark.parametrize("words", TARGETS)
def test_configs_of_a_target(tmp_path: Path, words: str) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 160}
    (tmp_path / "config.json").write_text(json.dumps(sizes | TARGETS[words]))
    problems = inspect(str(DRAFT), str(tmp_path)).problems
    assert any(words in problem.what for problem in problems)


@pytest.mark.parametrize("text", ["{", "[]", '{"added_tokens": 7}', '{"model": {"vocab": []}}'])
def test_a_broken_tokenizer_hides_the_text_of_the_mask_alone(tmp_path: Path, text: str) -> None:
    for file in TARGET.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(text)
    report = inspect(str(DRAFT), str(tmp_path))
    assert (report.problems, report.mask_token) == ([], None)


def test_names_from_a_file_are_no_commands_to_a_terminal(draft: Path) -> None:
    strange = {"a\nb\x1b[31m" + "x" * 9000: torch.zeros(1)}
    write_draft(draft, draft_config(), draft_weights(draft_config()) | strange)
    assert r"a\nb\x1b[31mxxx" in refusal_of(draft)


def many_tensors() -> tuple[bytes, int]:
    """The largest header, of scalars, and the bytes of its data."""
    entries: list[str] = []
    size = 0
    while size < HEADER_LIMIT - 100:
        i = len(entries)
        entries.append(f'"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')
        size += len(entries[-1]) + 1
    return f"{{{','.join(entries)}}}".encode(), len(entries)


def many_dimensions() -> tuple[bytes, int]:
    ones = ",".join(["1"] * (HEADER_LIMIT // 2 - 100))
    return f'{{"a":{{"dtype":"U8","shape":[{ones}],"data_offsets":[0,1]}}}}'.encode(), 1


def many_lists(size: int) -> bytes:
    return b'{"a":[' + b"[]," * (size // 3 - 9) + b"[]]}"


def many_names() -> bytes:
    pairs = ",".join(f'"{i:x}":"{i:x}"' for i in range(JSON_LIMIT // 19))
    return f'{{"weight_map":{{{pairs}}}}}'.encode()


# The files that take most memory of those that are small enough to be read.
LARGEST: dict[str, Callable[[Path], object]] = {
    "tensors": lambda folder: with_header(folder, *many_tensors()),
    "dimensions": lambda folder: with_header(folder, *many_dimensions()),
    "config": lambda folder: (folder / "config.json").write_bytes(many_lists(CONFIG_LIMIT)),
    "index": lambda folder: (folder / INDEX).write_bytes(many_names()),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_bytes(many_lists(JSON_LIMIT)),
}
MEASURE = """
import sys
from sglang_dflash.tools.cli import main
main(["inspect", sys.argv[1], "--target", sys.argv[2], "--json"])
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize(
    "what", ["tensors", *(pytest.param(w, marks=pytest.mark.full) for w in list(LARGEST)[1:])]
)
def test_inspect_takes_less_than_a_gigabyte(draft: Path, what: str) -> None:
    """The same folder is the target, for the tokenizer."""
    LARGEST[what](draft)
    command = [sys.executable, "-c", MEASURE, str(draft), str(draft)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stdout.split()[-2])
    print(what, kilobytes)
    assert kilobytes < 900_000


def test_a_pipe_ends_the_command(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (draft / "config.json").unlink()
    os.mkfifo(draft / "config.json")
    assert main(["inspect", str(draft)]) == 2
    assert "is a pipe or a device" in " ".join(capsys.readouterr().out.split())
