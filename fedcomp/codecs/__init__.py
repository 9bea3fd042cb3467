"""Codecs: which part of an update is sent, one file per compressor.

A codec that is imported here is known by its id and part of ``fedcomp``: that line is all it takes.
"""

import inspect

from fedcomp.codecs.adacomp import AdaComp as AdaComp
from fedcomp.codecs.auto import Auto as Auto
from fedcomp.codecs.base import Codec as Codec
from fedcomp.codecs.base import State as State
from fedcomp.codecs.base import require_finite as require_finite
from fedcomp.codecs.chain import Chain as Chain
from fedcomp.codecs.chain import Transform as Transform
from fedcomp.codecs.chain import chain as chain
from fedcomp.codecs.chain import get_transform as get_transform
from fedcomp.codecs.chain import registry as _transforms
from fedcomp.codecs.chunk import ChunkTop1 as ChunkTop1
from fedcomp.codecs.chunk import ChunkTopK as ChunkTopK
from fedcomp.codecs.clip import Clip as Clip
from fedcomp.codecs.dgc import DGC as DGC
from fedcomp.codecs.dithering import Dithering as Dithering
from fedcomp.codecs.domain import Domain as Domain
from fedcomp.codecs.eden import EDEN as EDEN
from fedcomp.codecs.factors import Factors as Factors
from fedcomp.codecs.feedback import ErrorFeedback as ErrorFeedback
from fedcomp.codecs.fft import DFT as DFT
from fedcomp.codecs.fft import FFT as FFT
from fedcomp.codecs.fixedpoint import FixedPoint as FixedPoint
from fedcomp.codecs.fixedpoint import fixed_point_of as fixed_point_of
from fedcomp.codecs.gradiveq import GradiVeQ as GradiVeQ
from fedcomp.codecs.identity import Identity as Identity
from fedcomp.codecs.keyregion import KeyRegion as KeyRegion
from fedcomp.codecs.lgc import LGC as LGC
from fedcomp.codecs.lowrank import LowRank as LowRank
from fedcomp.codecs.modular import ModularSum as ModularSum
from fedcomp.codecs.natural import NaturalCompression as NaturalCompression
from fedcomp.codecs.orthonormal import DCT as DCT
from fedcomp.codecs.orthonormal import Orthonormal as Orthonormal
from fedcomp.codecs.orthonormal import Rotation as Rotation
from fedcomp.codecs.positional import AdaptiveCodec as AdaptiveCodec
from fedcomp.codecs.positional import PositionalCodec as PositionalCodec
from fedcomp.codecs.positional import Stretch as Stretch
from fedcomp.codecs.power_sgd import PowerSGD as PowerSGD
from fedcomp.codecs.projection import RandomProjection as RandomProjection
from fedcomp.codecs.projection import Replay as Replay
from fedcomp.codecs.qsgd import QSGD as QSGD
from fedcomp.codecs.randomblock import RandomBlock as RandomBlock
from fedcomp.codecs.randomk import RandomK as RandomK
from fedcomp.codecs.registry import Registry as Registry
from fedcomp.codecs.registry import UnknownCodec as UnknownCodec
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.scalecom import ScaleCom as ScaleCom
from fedcomp.codecs.scaledsign import NormSign as NormSign
from fedcomp.codecs.scaledsign import ScaledSign as ScaledSign
from fedcomp.codecs.sidco import SIDCo as SIDCo
from fedcomp.codecs.signsgd import SignSGD as SignSGD
from fedcomp.codecs.stc import STC as STC
from fedcomp.codecs.terngrad import TernGrad as TernGrad
from fedcomp.codecs.threshold import Threshold as Threshold
from fedcomp.codecs.topk import TopK as TopK
from fedcomp.codecs.topk import diminishing as diminishing

register = codecs.register
get_codec = codecs.get
known = codecs.known
register_transform = _transforms.register

for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, Codec) and not inspect.isabstract(_class):
        register(_class)
register_transform(Clip)
