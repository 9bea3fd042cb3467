"""What of an update is sent: one file per compressor, found by name or made from a configuration that travels."""

from fedcomp.codecs.base import Codec, State, require_finite
from fedcomp.codecs.chain import Chain, Transform, chain, get_transform
from fedcomp.codecs.chain import registry as _transforms
from fedcomp.codecs.clip import Clip
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.positional import PositionalCodec, Stretch
from fedcomp.codecs.qsgd import QSGD
from fedcomp.codecs.randomk import RandomK
from fedcomp.codecs.registry import Registry, UnknownCodec, codecs
from fedcomp.codecs.topk import TopK

register = codecs.register
get_codec = codecs.get
known = codecs.known
register_transform = _transforms.register
known_transforms = _transforms.known

for _codec in (Identity, TopK, RandomK, QSGD, Chain, ErrorFeedback):
    register(_codec)
register_transform(Clip)

__all__ = [
    "QSGD",
    "Chain",
    "Clip",
    "Codec",
    "ErrorFeedback",
    "Identity",
    "PositionalCodec",
    "RandomK",
    "Registry",
    "State",
    "Stretch",
    "TopK",
    "Transform",
    "UnknownCodec",
    "chain",
    "get_codec",
    "get_transform",
    "known",
    "known_transforms",
    "register",
    "register_transform",
    "require_finite",
]
