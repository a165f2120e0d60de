"""The types of stored values, by the names that safetensors gives them."""

import mlx.core as mx
import numpy as np

DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}
"""Safetensors' names of MLX's types."""

TYPES = {name: dtype for dtype, name in DTYPES.items()}
"""MLX's types for them."""

NUMPY = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # NumPy has no such type: its bits
    "U32": np.uint32,
    "I32": np.int32,
    "U16": np.uint16,
    "I16": np.int16,
    "U8": np.uint8,
    "I8": np.int8,
    "U64": np.uint64,
    "I64": np.int64,
    "BOOL": np.bool_,
}
"""NumPy's types for them."""
