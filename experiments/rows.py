"""The rows of the table of systems: what each one is called, where it was published, and the settings it starts from.

Data only; :mod:`fedcomp.experiments.systems` makes systems of it. ``codec`` is what clients send with, below
:class:`fedcomp.strategies.compressed.Compressed`; a row without one is a strategy that sends whole models. Settings
below ``codec.`` are the codec's own parameters; only those that a user is likely to turn stand here with a default, the
codec takes all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fedcomp.experiments.spec import Scalar


class Row(NamedTuple):
    """One system.

    Attributes
    ----------
    name, title, paper, summary : str
        As in :class:`fedcomp.experiments.systems.System`.
    codec : str
        Id of the uplink's codec; empty for none.
    strategy : str
        The server's half: "compressed" (the drop-in pair, the default of rows with a codec), "shared_support",
        "coded_linear" (gradient descent on coded data), "gossip" (decentralised learning; the row's name is the
        algorithm's), "private" (a promise of privacy; made by :mod:`fedcomp.experiments.private_systems`), "graph"
        (learning on the parts of a graph; made by :mod:`fedcomp.experiments.graph_systems`), or "coded" (a construction
        around the drop-in pair, or around the inner strategy itself where there is no codec).
    construction : str
        Of a coded row: which of :data:`fedcomp.strategies.coded.strategy.CONSTRUCTIONS`.
    task : str
        Of a private or graph row: the kind of task it needs ("generator", "graph"); empty for any that learns from
        records.
    defaults : mapping
        Settings beyond the common ones, with their defaults. Of a coded row, those that are not the drop-in pair's are
        arguments of :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`, or options of the construction; see
        :data:`fedcomp.experiments.systems.CODED`. Of a gossip row, ``topology`` and the parameters of the algorithm
        that a user is likely to turn; what else all of them have is :data:`fedcomp.experiments.systems.GOSSIP`.
        ``compressor`` is a compressor's id, whose parameters are settings below ``compressor.``. Of a private row, what
        it has beyond :data:`fedcomp.experiments.private_systems.PRIVATE`, or has another default for; with a setting
        ``codec`` it has those of the drop-in pair as well, below ``codec.``, ``feedback.`` and ``downlink.``.
    """

    name: str
    title: str
    paper: str
    summary: str
    codec: str = ""
    defaults: Mapping[str, Scalar] = {}
    strategy: str = "compressed"
    construction: str = ""
    task: str = ""


ROWS: Final[tuple[Row, ...]] = (
    Row(
        "fedavg",
        "FedAvg",
        "McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data",
        "the whole model as plain float32 tensors; nothing of fedcomp is in the way",
    ),
    Row(
        "identity",
        "Identity codec",
        "none; the reference point of the format",
        "the whole model, bit for bit, as one frame",
        codec="identity",
    ),
    Row(
        "topk",
        "Top-k",
        "Stich, Cordonnier, Jaggi 2018, Sparsified SGD with memory",
        "the largest entries of the update in magnitude; the rest is remembered and added to the next update",
        codec="topk",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    Row(
        "randomk",
        "Random-k",
        "Stich, Cordonnier, Jaggi 2018, Sparsified SGD with memory",
        "entries drawn at random, whose positions the server redraws from a seed; the rest is remembered",
        codec="randomk",
        defaults={"feedback": True, "codec.density": 0.05},
    ),
    Row(
        "randomblock",
        "Random block",
        "Foroutan Eghlidi, Jaggi 2020, Sparse communication for training deep networks",
        "consecutive entries of each tensor from a start drawn at random, the same on all clients; the rest is "
        "remembered",
        codec="randomblock",
        defaults={"feedback": True, "codec.density": 0.05},
    ),
    Row(
        "chunk",
        "Chunk top-1",
        "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
        "training (its selector, on every client)",
        "the largest entry of every chunk of each tensor; the rest is remembered",
        codec="chunk",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    Row(
        "threshold",
        "Threshold",
        "the simplest sparsifier; no single source",
        "the entries whose magnitude exceeds a fixed level, however many these are; the rest is remembered",
        codec="threshold",
        defaults={"feedback": True, "codec.level": 0.05},
    ),
    Row(
        "dgc",
        "Deep gradient compression",
        "Lin et al. 2018, Deep gradient compression: reducing the communication bandwidth for distributed training",
        "the largest entries of a velocity that each client accumulates with momentum; many at first, few after a "
        "warm-up",
        codec="dgc",
        defaults={"feedback": False, "codec.density": 0.01, "codec.momentum": 0.9, "codec.warmup": 4},
    ),
    Row(
        "adacomp",
        "AdaComp",
        "Chen et al. 2018, AdaComp: adaptive residual gradient compression for data-parallel distributed training",
        "per bin of each tensor the entries that the update carries to the bin's largest, as signs with one scale; the "
        "rest is remembered",
        codec="adacomp",
        defaults={"feedback": False, "codec.bin": 500, "codec.conv_bin": 50},
    ),
    Row(
        "sidco",
        "SIDCo",
        "Abdelmoniem et al. 2021, An efficient statistical-based gradient compression technique for distributed "
        "training systems",
        "the entries above a threshold that is estimated from moments of the magnitudes; the rest is remembered",
        codec="sidco",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    Row(
        "keyregion",
        "Key regions",
        "derived here; stands in for Guo, Liu, Zhang 2021 (Sensors 21, 1943), whose predictor is not public",
        "a larger fraction of the blocks that hold most of the energy, above thresholds from running histograms; the "
        "rest is remembered",
        codec="keyregion",
        defaults={"feedback": True, "codec.key_density": 0.1, "codec.sparse_density": 0.005},
    ),
    Row(
        "stc",
        "Sparse ternary compression",
        "Sattler et al. 2020, Robust and communication-efficient federated learning from non-i.i.d. data",
        "the signs of the largest entries and their mean magnitude; the rest is remembered",
        codec="stc",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    Row(
        "qsgd",
        "QSGD",
        "Alistarh et al. 2017, QSGD: communication-efficient SGD via gradient quantization and encoding",
        "every entry of the update, randomly rounded to a few levels per bucket",
        codec="qsgd",
        defaults={"feedback": False},
    ),
    Row(
        "terngrad",
        "TernGrad",
        "Wen et al. 2017, TernGrad: ternary gradients to reduce communication in distributed deep learning",
        "every entry of the update, randomly rounded to zero or plus or minus the largest magnitude of its tensor",
        codec="terngrad",
        defaults={"feedback": False, "codec.clip": 0.0},
    ),
    Row(
        "natural",
        "Natural compression",
        "Horváth et al. 2019, Natural compression for distributed deep learning",
        "every entry of the update, randomly rounded to a power of two: sign and exponent",
        codec="natural",
        defaults={"feedback": False},
    ),
    Row(
        "efsignsgd",
        "EF-signSGD",
        "Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression schemes",
        "the sign of every entry and each tensor's mean magnitude; what that gets wrong is remembered",
        codec="scaledsign",
        defaults={"feedback": True},
    ),
    Row(
        "signsgd",
        "signSGD with majority vote",
        "Bernstein et al. 2018, signSGD: compressed optimisation for non-convex problems",
        "the sign of every entry as a vote; all entries move by the same step towards the majority",
        codec="signsgd",
        defaults={"feedback": False, "codec.step": 0.002},
    ),
    Row(
        "scalecom",
        "ScaleCom",
        "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
        "training",
        "entries that the round's leader chose, the same for all clients, so that their sum is as short as one update; "
        "the rest is remembered",
        codec="scalecom",
        defaults={
            "codec.density": 0.01,
            "codec.beta": 1.0,
            "server_lr": 1.0,
            "warmup_rounds": 0,
            "stale_leader": False,
        },
        strategy="shared_support",
    ),
    Row(
        "relay-rlnc",
        "Coded relay, RLNC",
        "Ho et al. 2006, A random linear network coding approach to multicast; the relay of updates is derived here",
        "shards of the coded update, spread over the other clients, of which any K decode but for 0.4 %",
        codec="qsgd",
        defaults={"code": "rlnc", "transport": "peers", "mix": False},
        strategy="coded",
        construction="relay",
    ),
    Row(
        "relay-mds",
        "Coded relay, MDS",
        "Blömer et al. 1995, An XOR-based erasure-resilient coding scheme; the relay of updates is derived here",
        "shards of the coded update, spread over the other clients, of which any K decode",
        codec="qsgd",
        defaults={"code": "mds", "transport": "peers", "private": 0},
        strategy="coded",
        construction="relay",
    ),
    Row(
        "fixedpoint",
        "Fixed point",
        "none; the preparation of updates for sums of integers",
        "entries drawn at random, the same on all clients, randomly rounded to integers on one grid; the rest is "
        "remembered",
        codec="fixedpoint",
        defaults={
            "feedback": True,
            "codec.codec": "randomk",
            "codec.density": 1.0,
            "codec.clip": 0.5,
            "codec.levels": 127,
        },
    ),
    Row(
        "sumcode",
        "Coded sum",
        "So et al. 2022, LightSecAgg (mode mask); the sum of shares is Shamir 1979, How to share a secret, with packed "
        "secrets, as reconstructed here",
        "shards of integers over a prime field, one for every other client; the clients add them, and the server "
        "decodes the sum of all updates and no single one",
        codec="fixedpoint",
        defaults={
            "feedback": True,
            "codec.codec": "randomk",
            "codec.density": 1.0,
            "codec.clip": 0.5,
            "codec.levels": 127,
            "transport": "peers",
            "private": 1,
            "mode": "share",
            "weighted": True,
            "max_weight": 0,
            "metrics": False,
            "least": 2,
        },
        strategy="coded",
        construction="sumcode",
    ),
    Row(
        "gradient-code",
        "Gradient coding",
        "Tandon et al. 2017, Gradient coding: avoiding stragglers in distributed learning",
        "one combination of the updates of s + 1 partitions, of which any n - s give the sum over all partitions",
        defaults={
            "losses": 1,
            "scheme": "auto",
            "arithmetic": "float64",
            "limit": 128.0,
            "approximate": False,
            "quorum": 0,
            "collect_timeout": 0.0,
        },
        strategy="coded",
        construction="gradcode",
    ),
    Row(
        "coded-linear",
        "Coded gradient descent",
        "Lin et al. 2019, Train where the data is: a case for bandwidth efficient coded training (abstract only; our "
        "reconstruction)",
        "linear models: products with combinations of data partitions, stored ahead, from which margins and gradient "
        "are solved for",
        defaults={
            "code": "balanced",
            "parities": 2,
            "density": 0.5,
            "payload": "float64",
            "transport": "hub",
            "approximate": False,
            "retries": 7,
        },
        strategy="coded_linear",
    ),
    Row(
        "dpsgd",
        "D-PSGD",
        "Lian et al. 2017, Can decentralized algorithms outperform centralized algorithms?",
        "the whole model to every neighbour, which takes a weighted mean",
        defaults={"topology": "ring", "gamma": 1.0},
        strategy="gossip",
    ),
    Row(
        "sgp",
        "Stochastic gradient push",
        "Assran et al. 2019, Stochastic gradient push for distributed deep learning",
        "the whole model with a share of the sender's weight to every out-neighbour of a directed graph",
        defaults={"topology": "exponential"},
        strategy="gossip",
    ),
    Row(
        "sparse-push",
        "Sparse-Push",
        "Aketi, Singh, Rabaey 2021, Sparse-Push: communication- and energy-efficient decentralized distributed "
        "learning over directed and time-varying graphs with non-IID datasets (abstract only; the iteration is "
        "derived here)",
        "the largest entries of the model's difference to what an out-neighbour knows, with a share of the weight",
        defaults={"topology": "exponential", "gamma": "auto", "estimates": "edge", "compressor": "topk"},
        strategy="gossip",
    ),
    Row(
        "choco",
        "CHOCO-SGD",
        "Koloskova, Stich, Jaggi 2019, Decentralized stochastic optimization and gossip algorithms with compressed "
        "communication",
        "the compressed difference of the model to what the neighbours know of it",
        defaults={"topology": "ring", "gamma": 0.1, "compressor": "topk"},
        strategy="gossip",
    ),
    Row(
        "deepsqueeze",
        "DeepSqueeze",
        "Tang et al. 2019, DeepSqueeze: decentralization meets error-compensated compression",
        "the compressed model; what compression left out is added to the next one",
        defaults={"topology": "ring", "gamma": 0.05, "compressor": "topk"},
        strategy="gossip",
    ),
    Row(
        "nids",
        "NIDS",
        "Li, Shi, Yan 2019, A decentralized proximal-gradient method with network independent step-sizes and separated "
        "convergence rates",
        "the whole decision vector to every neighbour; a dual vector removes the bias of differing data",
        defaults={"topology": "ring"},
        strategy="gossip",
    ),
    Row(
        "gradient-tracking",
        "Gradient tracking (DIGing)",
        "Nedić, Olshevsky, Shi 2017, Achieving geometric convergence for distributed optimization over time-varying "
        "graphs",
        "the whole model and an estimate of the mean gradient to every neighbour",
        defaults={"topology": "ring"},
        strategy="gossip",
    ),
    Row(
        "lead",
        "LEAD",
        "Liu et al. 2021, Linear convergent decentralized optimization with compression",
        "the compressed innovation of the decision vector; a dual vector removes the bias of differing data",
        defaults={"topology": "ring", "gamma": "1.0", "alpha": 0.5, "compressor": "dithering"},
        strategy="gossip",
    ),
    Row(
        "beer",
        "BEER",
        "Zhao et al. 2022, BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication "
        "compression",
        "the compressed differences of the model and of the tracked gradient to what the neighbours know of them",
        defaults={"topology": "ring", "gamma": "auto", "compressor": "topk"},
        strategy="gossip",
    ),
    Row(
        "cold",
        "COLD",
        "Zhang, You, Xie 2023, Innovation compression for communication-efficient distributed optimization with linear "
        "convergence (abstract only; the iteration is derived here)",
        "the compressed innovation of the decision vector; a dual vector removes the bias of differing data",
        defaults={"topology": "ring", "gamma": "auto", "compressor": "topk"},
        strategy="gossip",
    ),
    Row(
        "dyna-cold",
        "Dyna-COLD",
        "Zhang, You, Xie 2023, Innovation compression for communication-efficient distributed optimization with linear "
        "convergence (abstract only; the iteration is derived here)",
        "one bit per coordinate of the innovation, over a scale that both ends of an edge know without being told",
        defaults={"topology": "ring", "gamma": 0.3, "scale": "zoom", "rho": 0.95, "s0": 1.0},
        strategy="gossip",
    ),
    Row(
        "power-gossip",
        "PowerGossip",
        "Vogels, Karimireddy, Jaggi 2020, Practical low-rank communication compression in decentralized deep learning",
        "products of each weight matrix with a vector that both ends of an edge know: power steps on their difference",
        defaults={"topology": "ring", "rank": 1, "steps": 1, "rate": "1.0", "warm_start": True, "overlap": True},
        strategy="gossip",
    ),
    Row(
        "dp-fedavg",
        "DP-FedAvg",
        "McMahan et al. 2018, Learning differentially private recurrent language models",
        "the clipped update, alone: no metrics and no number of examples; noise is added to the sum of all updates",
        defaults={
            "codec": "",
            "feedback": False,
            "downlink": "",
            "clip": 1.0,
            "adaptive": False,
            "quantile": 0.5,
            "clip_rate": 0.2,
            "count_noise": 0.0,
            "count": 0,
        },
        strategy="private",
    ),
    Row(
        "random-mask",
        "random mask",
        "derived here: DP-FedAvg on coordinates that a public seed draws for all clients of a round",
        "the update on the round's coordinates, clipped there; noise is added on these coordinates alone",
        defaults={
            "codec": "randomk",
            "feedback": False,
            "downlink": "",
            "clip": 1.0,
            "count": 0,
            "codec.density": 0.1,
        },
        strategy="private",
    ),
    Row(
        "lsg",
        "LSG-style",
        "Ito et al. 2022, Scaling private deep learning with low-rank and sparse gradients (abstract); low rank after "
        "Yu et al. 2021, Large scale private learning via low-rank reparametrization (their code); the sparse half is "
        "derived here",
        "kept coordinates of the update's products with low-rank carriers of the model, clipped together; which ones "
        "are kept, a public seed says. rank of 0 factors nothing",
        defaults={
            "clip": 1.0,
            "rank": 8,
            "keep": 0.5,
            "schedule": "constant",
            "schedule_rounds": 0,
            "mask": "random",
            "whole": "",
            "history": 0,
            "count": 0,
        },
        strategy="private",
    ),
    Row(
        "distributed-dp",
        "distributed DP",
        "Kairouz, Liu and Steinke 2021, The distributed discrete Gaussian mechanism for federated learning with secure "
        "aggregation; Agarwal, Kairouz and Liu 2021, The Skellam mechanism (recalled)",
        "the clipped update in integers with a share of the noise, cut into coded shards: the server decodes a sum "
        "that is noisy already",
        defaults={
            "clip": 1.0,
            "noise": "discrete_gaussian",
            "tolerated": 0,
            "honest": 1.0,
            "private": 1,
            "density": 1.0,
            "feedback": False,
            "scale": 0,
            "rotate": False,
            "transport": "hub",
            "count": 0,
        },
        strategy="private",
    ),
    Row(
        "local-dp",
        "local DP",
        "the Gaussian mechanism on every client, before any codec; with integer noise (Canonne, Kamath, Steinke 2020)",
        "the update, clipped and noised on the client, then compressed: a message that needs no trusted server",
        defaults={
            "codec": "qsgd",
            "feedback": False,
            "downlink": "",
            "clip": 1.0,
            "releases": 0,
            "count": 0,
            "adjacency": "replace",
        },
        strategy="private",
    ),
    Row(
        "topagg",
        "TopAgg",
        "Wang et al. 2021, DataLens: scalable privacy preserving training via gradient compression and aggregation "
        "(abstract); its form for models of clients is derived here",
        "one vote: signs of the k largest coordinates of the update, drawn at random, packed; noise is added to the "
        "count of all votes. k of 0 takes the share density of the coordinates, saturation of 0 is none",
        defaults={
            "k": 0,
            "density": 0.1,
            "scope": "global",
            "saturation": 0.0,
            "stochastic": True,
            "mode": "mean",
            "beta": 0.0,
            "server_lr": 0.1,
            "downlink": "",
        },
        strategy="private",
    ),
    Row(
        "datalens",
        "DataLens",
        "Wang et al. 2021, DataLens: scalable privacy preserving training via gradient compression and aggregation "
        "(abstract and the authors' code)",
        "votes of teachers that learn on the client: for each generated image, top-k stochastic signs of the direction "
        "in which its pixels should move",
        defaults={
            "adjacency": "replace",
            "k": 200,
            "images": 15,
            "eta": 1e-3,
            "beta": 0.2,
            "teachers": 1,
            "saturation": 0.0,
            "stochastic": True,
            "generator_lr": 1e-3,
            "teacher_lr": 1e-3,
            "decay": 0.5,
            "pretrain": 10,
            "teacher_steps": 2,
            "batch": 30,
            "send": "generator",
            "population": 0,
        },
        strategy="private",
        task="generator",
    ),
    Row(
        "record-dp",
        "DP-SGD on clients",
        "Abadi et al. 2016, Deep learning with differential privacy",
        "the model after DP-SGD on the client's own records, noise added there, and what it cost; no metrics",
        defaults={
            "codec": "",
            "feedback": False,
            "downlink": "",
            "adjacency": "add_remove",
            "method": "dp-sgd",
            "record_rate": 0.1,
            "clip": 1.0,
            "k": 100,
            "keep": 0.5,
            "rank": 4,
        },
        strategy="private",
    ),
    Row(
        "skewed-gcn",
        "Skewed GCN sampling",
        "Jiang, Rumi 2021, Communication-efficient sampling for distributed training of graph convolutional networks "
        "(abstract only; the rule by which a variance budget sets the skew is derived here)",
        "model updates; and of its nodes' features, in clear, the rows that the sampled batches of other clients ask "
        "for: nodes that a client has itself are drawn more often, those of others less",
        strategy="graph",
        task="graph",
    ),
)
