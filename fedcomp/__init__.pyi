# What `import fedcomp as fc` offers, one name a line; __init__.py reads this file.

# The drop-in pair and what goes into it.
from fedcomp.clients.compressed import compression as compression
from fedcomp.strategies.compressed import Compressed as Compressed
from fedcomp.strategies.guard import Norms as Norms
from fedcomp.layout import SmallDense as SmallDense

# Codecs.
from fedcomp.codecs import AdaComp as AdaComp
from fedcomp.codecs import Chain as Chain
from fedcomp.codecs import ChunkTop1 as ChunkTop1
from fedcomp.codecs import Clip as Clip
from fedcomp.codecs import Codec as Codec
from fedcomp.codecs import DGC as DGC
from fedcomp.codecs import ErrorFeedback as ErrorFeedback
from fedcomp.codecs import FixedPoint as FixedPoint
from fedcomp.codecs import Identity as Identity
from fedcomp.codecs import KeyRegion as KeyRegion
from fedcomp.codecs import NaturalCompression as NaturalCompression
from fedcomp.codecs import QSGD as QSGD
from fedcomp.codecs import RandomBlock as RandomBlock
from fedcomp.codecs import RandomK as RandomK
from fedcomp.codecs import SIDCo as SIDCo
from fedcomp.codecs import STC as STC
from fedcomp.codecs import ScaleCom as ScaleCom
from fedcomp.codecs import ScaledSign as ScaledSign
from fedcomp.codecs import SignSGD as SignSGD
from fedcomp.codecs import TernGrad as TernGrad
from fedcomp.codecs import Threshold as Threshold
from fedcomp.codecs import TopK as TopK
from fedcomp.codecs import chain as chain
from fedcomp.codecs import get_codec as get_codec
from fedcomp.codecs import register as register

# Systems beyond the pair.
from fedcomp.strategies.shared_support import SharedSupport as SharedSupport
from fedcomp.strategies.coded.strategy import CodedFedAvg as CodedFedAvg
from fedcomp.strategies.coded.linear import CodedLinearGD as CodedLinearGD
from fedcomp.strategies.gossip.strategy import GossipRelay as GossipRelay
from fedcomp.strategies.gcn.strategy import SkewedGCN as SkewedGCN

# Privacy.
from fedcomp.strategies.private.dp_fedavg import DpFedAvg as DpFedAvg
from fedcomp.strategies.private.topagg import TopAgg as TopAgg
from fedcomp.strategies.private.datalens import DataLens as DataLens
from fedcomp.strategies.private.distributed_dp import DistributedDp as DistributedDp
from fedcomp.strategies.private.local_dp import local_dp as local_dp
from fedcomp.strategies.private.lsg import Lsg as Lsg
from fedcomp.strategies.private.record_dp import RecordDp as RecordDp
from fedcomp.privacy.sampling import Sampling as Sampling

# Running, counting and breaking it on purpose.
from fedcomp.flower.faults import RandomFaults as RandomFaults
from fedcomp.flower.faults import ScriptedFaults as ScriptedFaults
from fedcomp.flower.grid import InProcessGrid as InProcessGrid
from fedcomp.flower.metered import MeteredGrid as MeteredGrid

# Errors.
from fedcomp.errors import ConfigError as ConfigError
from fedcomp.errors import FedcompError as FedcompError
from fedcomp.errors import MissingExtra as MissingExtra
from fedcomp.errors import NoUsableReply as NoUsableReply

__version__: str
