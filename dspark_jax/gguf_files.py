"""GGUF files: metadata, and tensors dequantised row by row under the names of our parameter trees.

The header is parsed here because the vocabulary of a model is an array of some hundred thousand strings, for which the general
reader of the `gguf` package takes seconds; the block formats are dequantised by that package.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.model_files import require
from dspark_jax.tensor_files import TensorSource

SUPPORTED_VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
"""Value type -> `struct` format, by the numbers of the GGUF specification."""

TREE_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

GEMMA_TREE_NAMES = TREE_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of the `gemma3` architecture, whose layers have four norms."""

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: no parameter, but a part of the config (`model_configs`)."""


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file: rows of blocks of `quantisation` (a number of ggml), or plain numbers."""

    shape: tuple[int, ...]
    quantisation: int
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file whose header has been read.

    Attributes:
      metadata: by key; strings, numbers and lists of them.
      tensors: by the file's own name; shapes are (out, in), offsets count from the start of the file.
      content: the whole file, mapped into memory.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    content: np.ndarray


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, data: memoryview):
        self.data = data
        self.at = 0

    def unpack(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.unpack("<Q")
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error("string beyond the end of the file")
        return str(self.data[start : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.unpack(SCALARS[kind])
        item, count = self.unpack("<I"), self.unpack("<Q")
        if item in (STRING, ARRAY):
            return [self.value(item) for _ in range(count)]
        code = np.dtype(SCALARS[item])
        values = np.frombuffer(self.data, code, count, self.at)
        self.at += values.nbytes
        return values.tolist()


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file (version 2 or 3, little-endian); tensors stay in the file.

    Raises:
      ValueError: where it is no such file, is cut short, or is one part of a split model.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected a .gguf file")
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes")
    content = np.memmap(path, mode="r")
    header = _Header(content.data)
    if bytes(content[:4]) != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it does not begin with 'GGUF'")
    header.at = 4
    version = header.unpack("<I")
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(f"{path} has GGUF version {version}; supported: {SUPPORTED_VERSIONS}, little-endian")
    try:
        tensor_count, key_count = header.unpack("<Q"), header.unpack("<Q")
        metadata = {}
        for _ in range(key_count):
            key = header.string()
            metadata[key] = header.value(header.unpack("<I"))
        described = {}
        for _ in range(tensor_count):
            name = header.string()
            shape = tuple(reversed([header.unpack("<Q") for _ in range(header.unpack("<I"))]))
            described[name] = (shape, header.unpack("<I"), header.unpack("<Q"))
    except (struct.error, KeyError, ValueError, MemoryError) as error:
        raise ValueError(f"{path} has a damaged GGUF header near byte {header.at}: {error}") from error
    if metadata.get("split.count", 0) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts; merge them into one file first (llama-gguf-split --merge)")
    alignment = metadata.get("general.alignment", 32)
    start = -(-header.at // alignment) * alignment
    tensors = {name: GGUFTensor(shape, kind, start + offset) for name, (shape, kind, offset) in described.items()}
    return GGUFFile(path, metadata, tensors, content)


def read_tensor(file: GGUFFile, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Rows of a tensor (of its first axis) in float32.

    Raises:
      ValueError: where the file lacks the tensor, is cut short, or the tensor's format is unknown.
    """
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    constants = require("gguf.constants", "models", "reading GGUF files")
    quants = require("gguf.quants", "models", "reading GGUF files")
    tensor = file.tensors[name]
    try:
        kind = constants.GGMLQuantizationType(tensor.quantisation)
        block_elements, block_bytes = constants.GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file.path}: tensor {name} has the unknown ggml type {tensor.quantisation}") from error
    row_bytes = tensor.shape[-1] // block_elements * block_bytes
    size = math.prod(tensor.shape[:-1]) * row_bytes
    if tensor.offset + size > len(file.content):
        raise ValueError(f"{file.path} is cut short: tensor {name} ends at byte {tensor.offset + size} of {len(file.content)}")
    raw = file.content[tensor.offset : tensor.offset + size].reshape(*tensor.shape[:-1], row_bytes)
    if kind.name in ("F32", "F16", "F64"):
        return raw.view(f"<f{block_bytes}")[rows].astype(np.float32)
    if len(tensor.shape) == 1:
        return quants.dequantize(raw, kind)[rows]
    return quants.dequantize(raw[rows], kind)


def interleaved_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Row of a GGUF file at which each row of a q or k projection is found, for models of the `llama` architecture.

    llama.cpp rotates the pairs (2i, 2i + 1) of these models and stores the rows of every head in that order; we rotate the pairs
    (i, i + head_dim / 2), as Hugging Face does.
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def tree_name(name: str, names: Mapping[str, str] = TREE_NAMES) -> str:
    """Dotted tree path of a GGUF tensor ("blk.3.attn_q.weight" -> "layers_3.self_attn.q_proj.weight"); unknown ones keep their name."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer = "" if match[1] is None else f"layers_{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"


def gguf_sources(file: GGUFFile, config: Any) -> dict[str, TensorSource]:
    """The parameters in a GGUF file by dotted tree path, as Hugging Face stores them.

    llama.cpp reorders the rows of q and k where the architecture is `llama`, and adds 1 to the norms where it is `gemma3`: both
    are undone. `config` is the target's, of which the head sizes are read in the first case.
    """
    architecture = file.metadata.get("general.architecture")
    rows_of = {}
    if architecture == "llama":
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        rows_of = {name: interleaved_rows(count, config.head_dim) for name, count in heads.items()}
    gemma = architecture == "gemma3"

    def source(name: str, tensor: GGUFTensor) -> TensorSource:
        order = rows_of.get(name.split(".")[-2]) if "." in name else None
        added = np.float32(1 if gemma and name.endswith("norm.weight") else 0)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            rows = index[0] if order is None else order[index[0]]
            values = read_tensor(file, name, rows)[(slice(None), *index[1:])]
            return values - added if added else values

        return TensorSource(tensor.shape, read)

    names = GEMMA_TREE_NAMES if gemma else TREE_NAMES
    return {tree_name(name, names): source(name, tensor) for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
