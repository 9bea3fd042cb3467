"""FCW1: the wire format of an update. One frame per message; numpy only; safe to decode from anyone.

>>> import numpy as np
>>> from fedcomp import wire
>>> frame = wire.encode([wire.sparse((1000,), np.array([3, 14, 159]), np.float32([1.0, -2.0, 3.0]))])
>>> tensor = wire.decode(frame, expect=(wire.Expected("w", (1000,)),)).tensors[0]
>>> tensor.name, tensor.indices, tensor.values.decode()
('w', array([  3,  14, 159]), array([ 1., -2.,  3.], dtype=float32))
"""

from fedcomp.wire.accounting import tensor_bytes
from fedcomp.wire.backends import available_backends
from fedcomp.wire.choose import INDEX_BY_NAME, INDEX_CODECS, PLAIN
from fedcomp.wire.codebook import Codebook
from fedcomp.wire.decode import decode
from fedcomp.wire.errors import (
    BadMagic,
    ChecksumMismatch,
    Corrupt,
    LimitExceeded,
    NonFinite,
    SchemaMismatch,
    Truncated,
    UnsupportedCodec,
    UnsupportedVersion,
    WireError,
)
from fedcomp.wire.frame import (
    BASE_DIGEST,
    BASE_ROUND,
    BASIS_ID,
    FLAG_DELTA,
    FLAG_NEEDS_BASIS,
    MASK_ID,
    SEED,
    USER_TAG,
    Frame,
    encode,
)
from fedcomp.wire.index import IndexCodec, Indices, Support
from fedcomp.wire.levels import VALUE_BY_NAME, VALUE_CODECS, QsgdLevels, Ternary
from fedcomp.wire.limits import (
    COEFFICIENTS,
    DENSE,
    DTYPES,
    SHARED,
    SPARSE,
    Expected,
    Kind,
    Limits,
    Schema,
)
from fedcomp.wire.longest import FILLED, longest, pad
from fedcomp.wire.modelled import Levels
from fedcomp.wire.planes import Planes
from fedcomp.wire.quantised import Ones, SignScale, Uniform, UnitSign
from fedcomp.wire.rangefloat import RangeFloat
from fedcomp.wire.residues import Residues
from fedcomp.wire.section import SECTION_INDEX, Section, put_block, take_block
from fedcomp.wire.support import Seeded, SharedSupport, seeded_block, seeded_support
from fedcomp.wire.tensor import Bundle, FrameSizes, Tensor, dense, seeded, shared, sparse
from fedcomp.wire.values import Bf16, Fp16, Natural, Raw, Values

__all__ = [
    "BASE_DIGEST",
    "BASE_ROUND",
    "BASIS_ID",
    "COEFFICIENTS",
    "DENSE",
    "DTYPES",
    "FILLED",
    "FLAG_DELTA",
    "FLAG_NEEDS_BASIS",
    "INDEX_BY_NAME",
    "INDEX_CODECS",
    "MASK_ID",
    "PLAIN",
    "SECTION_INDEX",
    "SEED",
    "SHARED",
    "SPARSE",
    "USER_TAG",
    "VALUE_BY_NAME",
    "VALUE_CODECS",
    "BadMagic",
    "Bf16",
    "Bundle",
    "ChecksumMismatch",
    "Codebook",
    "Corrupt",
    "Expected",
    "Fp16",
    "Frame",
    "FrameSizes",
    "IndexCodec",
    "Indices",
    "Kind",
    "Levels",
    "LimitExceeded",
    "Limits",
    "Natural",
    "NonFinite",
    "Ones",
    "Planes",
    "QsgdLevels",
    "RangeFloat",
    "Raw",
    "Residues",
    "Schema",
    "SchemaMismatch",
    "Section",
    "Seeded",
    "SharedSupport",
    "SignScale",
    "Support",
    "Tensor",
    "Ternary",
    "Truncated",
    "Uniform",
    "UnitSign",
    "UnsupportedCodec",
    "UnsupportedVersion",
    "Values",
    "WireError",
    "available_backends",
    "decode",
    "dense",
    "encode",
    "longest",
    "pad",
    "put_block",
    "seeded",
    "seeded_block",
    "seeded_support",
    "shared",
    "sparse",
    "take_block",
    "tensor_bytes",
]
