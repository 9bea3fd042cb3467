# What `import fedcomp as fc` offers, one name a line; __init__.py reads this file.

# The drop-in pair and what goes into it.
from fedcomp.clients.compressed import compression as compression
from fedcomp.strategies.compressed import Compressed as Compressed
from fedcomp.strategies.guard import Norms as Norms
from fedcomp.layout import SmallDense as SmallDense

# Every codec, and how they are combined.
from fedcomp.codecs import *

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
