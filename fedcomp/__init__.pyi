# What `import fedcomp as fc` offers, one name a line; __init__.py reads this file. Nothing of it is executed: for type
# checkers alone it may name layers above this one.

# The drop-in pair and what goes into it.
from fedcomp.clients.compressed import compression as compression
from fedcomp.strategies.compressed import Compressed as Compressed
from fedcomp.strategies.adapters import Adapters as Adapters
from fedcomp.adapters import freeze as freeze
from fedcomp.flower.records import base_digest as base_digest
from fedcomp.flower.records import record as record
from fedcomp.flower.records import tensors as tensors
from fedcomp.strategies.guard import Norms as Norms
from fedcomp.strategies.outer import Nesterov as Nesterov
from fedcomp.strategies.outer import SignStep as SignStep
from fedcomp.strategies.rare import DeMo as DeMo
from fedcomp.strategies.rare import DiLoCo as DiLoCo
from fedcomp.strategies.rare import SparseLoCo as SparseLoCo
from fedcomp.strategies.overlap import PipelinedStrategy as PipelinedStrategy
from fedcomp.strategies.by_layer import LayerByLayer as LayerByLayer
from fedcomp.strategies.overlap import Buffered as Buffered
from fedcomp.strategies.deadlines import Deadline as Deadline
from fedcomp.strategies.conditional import Conditional as Conditional
from fedcomp.strategies.forward import ForwardGradients as ForwardGradients
from fedcomp.layout import SmallDense as SmallDense

# Every codec, and how they are combined.
from fedcomp.codecs import *

# Systems beyond the pair.
from fedcomp.strategies.shared_support import SharedSupport as SharedSupport
from fedcomp.strategies.power_sgd import SharedBasis as SharedBasis
from fedcomp.strategies.gradiveq import FittedBasis as FittedBasis
from fedcomp.strategies.lgc import LearnedGradients as LearnedGradients
from fedcomp.layout import EndsDense as EndsDense
from fedcomp.factors.capture import capture as capture
from fedcomp.factors.capture import chain_of as chain_of
from fedcomp.strategies.coded.strategy import CodedFedAvg as CodedFedAvg
from fedcomp.strategies.coded.linear import CodedLinearGD as CodedLinearGD
from fedcomp.strategies.gossip.strategy import GossipRelay as GossipRelay
from fedcomp.strategies.gcn.strategy import SkewedGCN as SkewedGCN

# The client's side of all systems: one entry point, and the halves that need something from the app's author.
from fedcomp.clients.client import client as client
from fedcomp.clients.half import ClientHalf as ClientHalf
from fedcomp.clients.coded.linear import linear_device as linear_device
from fedcomp.clients.conditional import Sensors as Sensors
from fedcomp.clients.conditional import conditional as conditional
from fedcomp.clients.forward import forward_gradients as forward_gradients
from fedcomp.forward.activity import activity_gradients as activity_gradients
from fedcomp.forward.evaluate import Objective as Objective
from fedcomp.clients.optimizer import kept as kept
from fedcomp.clients.gossip import gossip_node as gossip_node
from fedcomp.clients.gcn import graph_owner as graph_owner
from fedcomp.clients.private.datalens import datalens_teachers as datalens_teachers
from fedcomp.clients.private.dpsgd import record_dp as record_dp
from fedcomp.clients.private.local_dp import local_privacy as local_privacy
from fedcomp.clients.private.topagg import votes_only as votes_only

# Privacy.
from fedcomp.strategies.private.dp_fedavg import DpFedAvg as DpFedAvg
from fedcomp.strategies.private.topagg import TopAgg as TopAgg
from fedcomp.strategies.private.datalens import DataLens as DataLens
from fedcomp.strategies.private.distributed_dp import DistributedDp as DistributedDp
from fedcomp.strategies.private.local_dp import local_dp as local_dp
from fedcomp.strategies.private.lsg import Lsg as Lsg
from fedcomp.strategies.private.record_dp import RecordDp as RecordDp
from fedcomp.strategies.private.settings import ShareSettings as ShareSettings
from fedcomp.systems.private.record import DpSgdPlan as DpSgdPlan
from fedcomp.privacy.local import Privatise as Privatise
from fedcomp.privacy.sampling import Sampling as Sampling

# Running, counting and breaking it on purpose.
from fedcomp.experiments.advise import advise as advise
from fedcomp.flower.faults import RandomFaults as RandomFaults
from fedcomp.flower.faults import ScriptedFaults as ScriptedFaults
from fedcomp.flower.grid import InProcessGrid as InProcessGrid
from fedcomp.flower.metered import MeteredGrid as MeteredGrid
from fedcomp.flower.tracking import to_mlflow as to_mlflow
from fedcomp.flower.tracking import to_wandb as to_wandb
from fedcomp.flower.tracking import track as track

# Errors.
from fedcomp.errors import ConfigError as ConfigError
from fedcomp.errors import FedcompError as FedcompError
from fedcomp.errors import MissingExtra as MissingExtra
from fedcomp.errors import NoUsableReply as NoUsableReply

__version__: str
