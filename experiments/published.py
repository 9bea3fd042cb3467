"""The claims of papers, and the experiments' claims that test them: the rows of the book of results.

A paper's claim has a mark: "read" in the paper itself, "abstract" where only that was read, "recalled" where nothing
was at hand. Nothing here says that a paper is wrong: its networks, data and machines are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Mark = Literal["read", "abstract", "recalled", "second-hand"]
MARKS: Final[Mapping[Mark, str]] = {
    "read": "read in the paper",
    "abstract": "from the abstract",
    "recalled": "from memory",
    "second-hand": "second-hand",
}
"""What the book of results prints for a mark."""


class Published(NamedTuple):
    """A published system.

    Attributes
    ----------
    name : str
    paper : str
        Authors, venue and year.
    claim : str
        What the paper claims, as far as it is known.
    mark : str
        How that is known.
    ours : str
        Our claim: what is measured here in its place.
    experiment : str
        Where it is measured: a name of :data:`fedcomp.experiments.catalog.CATALOG`.
    evidence : tuple of str
        Names of that experiment's claims, as patterns of :mod:`fnmatch`, each of which must match at least one. All
        that match hold: reproduced; some: partly; none: not reproduced.
    page : str
        The system's page, below ``docs``.
    """

    name: str
    paper: str
    claim: str
    mark: Mark
    ours: str
    experiment: str
    evidence: tuple[str, ...]
    page: str


PUBLISHED: Final[tuple[Published, ...]] = (
    Published(
        "EDEN",
        "Vargaftik et al., ICML 2022",
        "One to four unbiased bits a value, whose error falls with the number of clients",
        "recalled",
        "One bit a value loses at most a point after 40 rounds, at least 25 times fewer bytes up",
        "bits",
        ("EDEN, 1 bit: points lost", "EDEN, 1 bit: times fewer up"),
        "systems/eden.md",
    ),
    Published(
        "AdaComp",
        "Chen et al., AAAI 2018",
        "About 40 times fewer bytes in convolutional and 200 times in fully connected layers, without noticeable loss",
        "abstract",
        "The same ratios by layer, and at most 1.1 times the training loss of dense averaging",
        "adacomp",
        ("AdaComp: times fewer encoded bytes*", "AdaComp: train loss over*", "AdaComp, small layers dense: train*"),
        "systems/superseded.md",
    ),
    Published(
        "SIDCo",
        "Abdelmoniem et al., MLSys 2021",
        "Training up to 41.7 times faster than uncompressed and 7.6 times faster than with top-k, on accelerators",
        "abstract",
        "On a CPU: selection no slower than exact top-k, and as many values as asked for, within a factor of two",
        "sidco",
        ("density * time of exact top-k*", "gradients, P, M = 2: share within 2x"),
        "systems/superseded.md",
    ),
    Published(
        "ScaleCom",
        "Chen et al., NeurIPS 2020",
        "65 to 400 times fewer bytes with up to 64 learners, and traffic that does not grow with them",
        "abstract",
        "With 64 clients in place of 2 the downlink grows at most 1.2 times; the memory stays bounded",
        "scalecom",
        ("CLT-k: downlink grows, times", "CLT-k, rotating leader: memory norm*"),
        "systems/scalecom.md",
    ),
    Published(
        "FFT sparsification",
        "Wang et al., HPDC 2020",
        "A smaller error and better accuracy than QSGD, TernGrad and top-k",
        "abstract",
        "A smaller error than top-k on convolutions, and as accurate as top-k, DCT, QSGD and TernGrad",
        "fft",
        ("conv2, 5 %: error of DFT, H,W,D,F over top-k's", "FFT 15 %, range8: points lost against*"),
        "systems/superseded.md",
    ),
    Published(
        "Random blocks",
        "Foroutan Eghlidi and Jaggi, 2020",
        "Random blocks come close to plain SGD at a lower overhead",
        "abstract",
        "Memory helps random blocks, by layer and over the whole model",
        "sparse_study",
        ("random-block*: train loss without memory over with it, least",),
        "systems/superseded.md",
    ),
    Published(
        "GradiVeQ",
        "Yu et al., NeurIPS 2018",
        "Aggregation more than 5 times faster by linear projections that a ring can add",
        "abstract",
        "Times fewer bytes, points lost, and as accurate as 8 bits, low rank and top-k in fewer bytes",
        "gradiveq",
        ("pooled, 20 + 130: points lost*", "pooled, 20 + 130: times fewer bytes"),
        "systems/superseded.md",
    ),
    Published(
        "LGC",
        "Abrahamyan et al., IEEE TNNLS 33(12), 2022",
        "0.18 points below dense training with ResNet-101 on CIFAR-10, at higher ratios than its rivals",
        "abstract",
        "At most a point lost, and as accurate as a shared support with 8-bit values in fewer bytes",
        "lgc",
        ("LGC, *, decoded memory: points lost*",),
        "systems/superseded.md",
    ),
    Published(
        "PowerSGD",
        "Vogels et al., NeurIPS 2019",
        "Within a point of SGD on CIFAR-10 at ranks 1 to 4, with 72 to 243 times fewer bytes",
        "recalled",
        "At most a point lost at ranks 2 and 4, and as accurate as top-k at equal bytes both ways",
        "power_sgd",
        ("PowerSGD, rank ?: points lost*", "PowerSGD, rank ?: times fewer up"),
        "systems/power_sgd.md",
    ),
    Published(
        "dAD, edAD, rank-dAD",
        "Baker et al., 2021, arXiv:2102.09631",
        "No loss by sending factors in place of gradients; fewer bytes than other compressors at low rank",
        "abstract",
        "Exact to 1e-5; as accurate as PowerSGD and top-k at equal bytes",
        "factors",
        ("chain of layers, dAD*", "chain of layers, edAD*", "dAD: points lost", "rank-dAD, ?: points lost against*"),
        "systems/factors.md",
    ),
    Published(
        "Pipe-SGD",
        "Li et al., NeurIPS 2018",
        "Up to 5.4 times less time than synchronous training, and faster than an asynchronous server",
        "abstract",
        "The recursion to 1e-5, time with two rounds in flight, and time to a target against two rivals",
        "pipe_sgd",
        ("width 2: relative*", "width 2: seconds over those of width 1*", "two cohorts: seconds to the target*"),
        "systems/overlapping.md",
    ),
    Published(
        "FedBuff",
        "Nguyen et al., AISTATS 2022",
        "Buffered asynchronous steps reach a target sooner than synchronous rounds",
        "recalled",
        "Time to a target against synchronous rounds, the best deadline and single updates",
        "async",
        ("buffered: seconds to the target over*",),
        "systems/overlapping.md",
    ),
    Published(
        "FLARE",
        "Chow et al., 2023, arXiv:2305.08504",
        "More than 5 times less data than fixed intervals, and drift found at least 16 times sooner",
        "abstract",
        "The same two ratios against an interval of 50 ticks",
        "flare",
        ("digits: bytes of a fixed interval of 50*", "digits: latency of a fixed interval of 50*"),
        "systems/flare.md",
    ),
    Published(
        "Forward gradients",
        "Ren et al., ICLR 2023; BAFFLE and others",
        "Forward gradients of activities with local losses match back-propagation on MNIST",
        "abstract",
        "Points behind back-propagation on MNIST; scalars against rivals at equal bytes",
        "forward",
        ("MNIST: points behind back-propagation*", "points ahead of the best rival*"),
        "systems/forward.md",
    ),
    Published(
        "FFA-LoRA",
        "Sun, Li, Li, Ding, ICLR 2024",
        "Adapters whose half A is frozen average exactly, in half of the bytes, and are no worse than both halves",
        "recalled",
        "Loss with A frozen, twice the rank and one bit in both directions, against LoRA FedAvg in float32",
        "adapters",
        ("frozen A, 1 bit: times fewer both ways", "frozen A, 1 bit: seeds with a larger loss than*"),
        "how-to/adapters.md",
    ),
    Published(
        "FFA-LoRA under differential privacy",
        "Sun, Li, Li, Ding, ICLR 2024",
        "Noise costs less where half A is frozen, for the noises of two halves multiply",
        "recalled",
        "Loss at epsilon 8 with A frozen against both halves, as many values, for clients and for records as the unit",
        "private_adapters",
        ("clients, frozen A: seeds with a larger*", "records, frozen A: seeds with a larger*"),
        "how-to/adapters.md",
    ),
    Published(
        "DiLoCo",
        "Douillard et al., 2023, arXiv:2311.08105",
        "Exchanges of hundreds of steps reach the loss of training that exchanges in every step",
        "recalled",
        "Loss with one bit in both directions over that of whole models, of the same outer step and computation",
        "diloco",
        ("DiLoCo: times the loss against DiLoCo, whole models", "DiLoCo: times fewer both ways*"),
        "systems/diloco.md",
    ),
    Published(
        "SparseLoCo",
        "Sarfi et al., 2025",
        "One to three percent of the values in two bits train no worse than DiLoCo",
        "abstract",
        "Loss at 1/64 over that of whole-model DiLoCo, and bytes of both directions",
        "diloco",
        ("SparseLoCo: times the loss against DiLoCo, whole models", "SparseLoCo: times fewer both ways*"),
        "systems/diloco.md",
    ),
    Published(
        "DeMo",
        "Peng, Quesnelle and Kingma, 2024, arXiv:2411.19870",
        "Few cosines of each momentum and a step by signs train as well as an exchange of whole gradients",
        "abstract",
        "Loss over that of DiLoCo with whole models, of as many steps with gradients of as many examples",
        "diloco",
        ("DeMo: times the loss against DiLoCo, whole models",),
        "systems/diloco.md",
    ),
    Published(
        "Coded relays",
        "Ho et al., 2006 (network coding); Blömer et al., 1995 (Cauchy codes)",
        "Any K coded shards restore what was sent",
        "recalled",
        "Replies of clients that vanish count, to the bit, and more of them than with plain uploads",
        "coded_dropout",
        ("QSGD-8, * relay: bytes that differ*", "QSGD-8, * relay: fraction more than by plain upload"),
        "systems/coded-relay.md",
    ),
    Published(
        "LightSecAgg and coded sums",
        "So et al., MLSys 2022",
        "The sum of updates survives clients that vanish, and no single update is seen",
        "recalled",
        "The sum is exact in every round; what the server receives does not grow with the clients",
        "sumcode",
        ("exact rounds, mode *", "coded sum: server receives, 50 clients over 5"),
        "systems/sumcode.md",
    ),
    Published(
        "Gradient coding",
        "Tandon et al., ICML 2017",
        "Rounds stay exact while any s of n devices are missing, and take less time",
        "recalled",
        "Weights to 1e-6 of waiting for all; seconds over waiting for all",
        "gradient_coding",
        ("gradient code, s = ?: off in weights*", "gradient code, s = ?: seconds over waiting*"),
        "systems/gradient-coding.md",
    ),
    Published(
        "Random linear codes for coded training",
        "Lin et al., 2019, arXiv:1910.10283",
        "Half of the total traffic of MDS coded computation",
        "abstract",
        "Set-up traffic of half an MDS code's, and how likely the loss of devices is survived",
        "coded_training",
        ("*set-up bytes over MDS, mean over draws, off 0.5", "*: P(decodes) at loss 0.3 over MDS's"),
        "systems/coded-training.md",
    ),
    Published(
        "Sums over a channel that adds",
        "Zhang et al., 2023",
        "Less distortion of the sum than separate coding",
        "abstract",
        "Error of the sum against separate coding and against uncoded transmission",
        "modular_sum",
        ("coded over * error at * dB",),
        "background/codecs.md",
    ),
    Published(
        "Sparse-Push",
        "Aketi et al., 2021, arXiv:2102.05715",
        "Up to 466 times fewer bytes with 1 % degradation on CIFAR-10; a variant for unlike data",
        "abstract",
        "At least 400 times smaller messages within a point, and four settings of unlike data",
        "sparse_push",
        ("exponential, IID, 2 values: *", "*digits per node, 1 %: points below SGP, closed"),
        "systems/push-sum.md",
    ),
    Published(
        "CHOCO and DeepSqueeze",
        "Koloskova et al., ICML 2019; Tang et al., 2019",
        "Gossip converges linearly under arbitrary compression",
        "abstract",
        "CHOCO reaches the mean; DeepSqueeze with the same compressor does not",
        "consensus",
        ("CHOCO, top-k, ring: last error", "DeepSqueeze, top-k: last error*"),
        "systems/gossip-undirected.md",
    ),
    Published(
        "COLD and Dyna-COLD",
        "Zhang, You, Xie, IEEE TAC 68(11), 2023",
        "Linear convergence to the exact optimum under compression",
        "abstract",
        "Iterations at most 1.2 times those of NIDS at 25 times fewer bits; the error falls along a straight line",
        "cold",
        ("Dyna-COLD, 1 bit, *: iterations, times NIDS'", "Dyna-COLD, 1 bit, *: times fewer*", "COLD, 1 bit and*"),
        "systems/gossip-exact.md",
    ),
    Published(
        "PowerGossip",
        "Vogels, Karimireddy, Jaggi, NeurIPS 2020",
        "On par with tuned compressors, without tuning",
        "abstract",
        "Accuracy within a point of D-PSGD, and of CHOCO with top-k and with scaled signs",
        "power_gossip",
        ("PowerGossip, rank 1: accuracy over*", "PowerGossip, rank 2: accuracy over*"),
        "systems/gossip-undirected.md",
    ),
    Published(
        "TopAgg votes at record level",
        "Wang et al., CCS 2021 (DataLens)",
        "Better than DP-SGD in most cases",
        "abstract",
        "Accuracy over DP-SGD's at epsilon 1, 3 and 10",
        "topagg_dpsgd",
        ("TopAgg, *epsilon *: accuracy over DP-SGD's",),
        "systems/record-dp.md",
    ),
    Published(
        "TopAgg votes of clients",
        "our client-level form of Wang et al., CCS 2021",
        "The paper has no such form",
        "read",
        "Accuracy against DP-FedAvg at epsilon 1, 3 and 10; bytes of votes",
        "topagg",
        ("TopAgg, epsilon *: accuracy less that of dense", "uplink of dense over votes, the longest"),
        "systems/dp-fedavg.md",
    ),
    Published(
        "DataLens",
        "Wang et al., CCS 2021",
        "A generator whose images train a classifier to 71 % (epsilon 1) and 81 % (epsilon 10) on MNIST",
        "recalled",
        "The same figures, and accuracy against simple private rivals",
        "datalens_mnist",
        ("TopAgg votes, epsilon *: accuracy", "TopAgg votes, epsilon *: accuracy over*"),
        "systems/datalens.md",
    ),
    Published(
        "Skewed sampling of graphs",
        "Jiang and Rumi, 2021, arXiv:2101.07706",
        "Local nodes are drawn more often, so that fewer remote rows are fetched at the same accuracy",
        "abstract",
        "At least 3 to 4 times fewer remote rows within a point; points above uniform and boundary sampling",
        "gcn",
        ("*times fewer remote rows than with s = 1", "*points of accuracy below s = 1", "*points above * sampling*"),
        "systems/gcn.md",
    ),
)
"""In the order of the pages."""
