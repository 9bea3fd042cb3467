"""What of an update is sent: one file per compressor, found by name or made from a configuration that travels."""

from fedcomp.codecs.adacomp import AdaComp
from fedcomp.codecs.base import Codec, State, require_finite
from fedcomp.codecs.chain import Chain, Transform, chain, get_transform
from fedcomp.codecs.chain import registry as _transforms
from fedcomp.codecs.chunk import ChunkTop1
from fedcomp.codecs.clip import Clip
from fedcomp.codecs.dgc import DGC
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.fixedpoint import FixedPoint, fixed_point_of
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.keyregion import KeyRegion
from fedcomp.codecs.natural import NaturalCompression
from fedcomp.codecs.positional import AdaptiveCodec, PositionalCodec, Stretch
from fedcomp.codecs.qsgd import QSGD
from fedcomp.codecs.randomblock import RandomBlock
from fedcomp.codecs.randomk import RandomK
from fedcomp.codecs.registry import Registry, UnknownCodec, codecs
from fedcomp.codecs.scalecom import ScaleCom
from fedcomp.codecs.scaledsign import ScaledSign
from fedcomp.codecs.sidco import SIDCo
from fedcomp.codecs.signsgd import SignSGD
from fedcomp.codecs.stc import STC
from fedcomp.codecs.terngrad import TernGrad
from fedcomp.codecs.threshold import Threshold
from fedcomp.codecs.topk import TopK

register = codecs.register
get_codec = codecs.get
known = codecs.known
register_transform = _transforms.register
known_transforms = _transforms.known

for _codec in (
    RandomBlock,
    ChunkTop1,
    AdaComp,
    Identity,
    TopK,
    RandomK,
    QSGD,
    Chain,
    ErrorFeedback,
    DGC,
    SignSGD,
    ScaleCom,
    ScaledSign,
    TernGrad,
    NaturalCompression,
    STC,
    Threshold,
    SIDCo,
    KeyRegion,
    FixedPoint,
):
    register(_codec)
register_transform(Clip)

__all__ = [
    "DGC",
    "QSGD",
    "STC",
    "AdaComp",
    "AdaptiveCodec",
    "Chain",
    "ChunkTop1",
    "Clip",
    "Codec",
    "ErrorFeedback",
    "FixedPoint",
    "Identity",
    "KeyRegion",
    "NaturalCompression",
    "PositionalCodec",
    "RandomBlock",
    "RandomK",
    "Registry",
    "SIDCo",
    "ScaleCom",
    "ScaledSign",
    "SignSGD",
    "State",
    "Stretch",
    "TernGrad",
    "Threshold",
    "TopK",
    "Transform",
    "UnknownCodec",
    "chain",
    "fixed_point_of",
    "get_codec",
    "get_transform",
    "known",
    "known_transforms",
    "register",
    "register_transform",
    "require_finite",
]
