"""Systems of the drop-in pair: one for every codec with a single exchange, and plain FedAvg for comparison.

Only settings that a user is likely to turn have a default here; below ``codec.`` a codec takes all its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.outer import Nesterov, SignStep
from fedcomp.strategies.parts import (
    INNER_PREFIX,
    PAIR_PREFIXES,
    Scalar,
    Settings,
    downlink,
    make_inner,
    pair_of,
    policy,
    uplink,
)
from fedcomp.strategies.rare import cosines
from fedcomp.strategies.system import System, arguments, codec_settings, settings_of

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy


def build_pair(settings: Settings, seed: int, *, codec: str, feedback: bool | None = False) -> Strategy:
    """Return the drop-in pair with a codec and the settings of its parts.

    ``feedback`` is False where the setting of that name alone decides, None where the codec does.
    """
    return pair_of(settings)(
        make_inner(settings),
        uplink(settings, codec),
        downlink(settings),
        feedback=feedback,
        policy=policy(settings),
        first_model_at_nodes=bool(settings.get("first_model_at_nodes", False)),
        seed=seed,
    )


FIXED_POINT: Final[Mapping[str, Scalar]] = MappingProxyType(
    {
        "feedback": True,
        "codec.codec": "randomk",
        "codec.density": 1.0,
        "codec.clip": 0.5,
        **codec_settings("fixedpoint", "levels"),
    }
)
"""Of updates as integers on one grid, as coded sums need them."""


OUTER: Final[Mapping[str, Scalar]] = MappingProxyType(
    {"inner": "nesterov", **{f"{INNER_PREFIX}{k}": v for k, v in settings_of(Nesterov, "lr", "momentum").items()}}
)
"""An outer step of Nesterov's momentum: :class:`fedcomp.strategies.outer.Nesterov`."""


def _pair(name: str, title: str, paper: str, summary: str, codec: str, defaults: Settings = FIXED_POINT) -> System:
    build = partial(build_pair, codec=codec)
    own = {"downlink": "", "adapters": False, "first_model_at_nodes": False, **defaults}
    return System(name, title, paper, summary, build, own, PAIR_PREFIXES)


_COSINES: Final = settings_of(cosines, "kept", "chunk", "values", "decay")
_SIGNS: Final[Mapping[str, Scalar]] = MappingProxyType(
    {"inner": "signstep", **{f"{INNER_PREFIX}{k}": v for k, v in settings_of(SignStep, "lr", "falls").items()}}
)


def _demo(settings: Settings, seed: int) -> Strategy:
    codec = cosines(**arguments(cosines, settings, _COSINES))
    return Compressed(make_inner(settings), codec, downlink(settings), policy=policy(settings), seed=seed)


SYSTEMS: Final = (
    System(
        "fedavg",
        "FedAvg",
        "McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data",
        "the whole model as plain float32 tensors; without fedcomp",
        lambda settings, seed: make_inner(settings),
    ),
    _pair(
        "identity",
        "Identity codec",
        "none; the reference point of the format",
        "the whole model, bit for bit, as one frame",
        codec="identity",
        defaults={},
    ),
    _pair(
        "topk",
        "Top-k",
        "Stich, Cordonnier, Jaggi 2018, Sparsified SGD with memory",
        "the largest entries of the update in magnitude; the rest is remembered and added to the next update",
        codec="topk",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    _pair(
        "randomk",
        "Random-k",
        "Stich, Cordonnier, Jaggi 2018, Sparsified SGD with memory",
        "entries drawn at random, whose positions the server redraws from a seed; the rest is remembered",
        codec="randomk",
        defaults={"feedback": True, "codec.density": 0.05},
    ),
    _pair(
        "randomblock",
        "Random block",
        "Foroutan Eghlidi, Jaggi 2020, Sparse communication for training deep networks",
        "consecutive entries of each tensor from a start drawn at random, the same on all clients; the rest is "
        "remembered",
        codec="randomblock",
        defaults={"feedback": True, "codec.density": 0.05},
    ),
    _pair(
        "chunk",
        "Chunk top-1",
        "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
        "training (its selector, on every client)",
        "the largest entry of every chunk of each tensor; the rest is remembered",
        codec="chunk",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    _pair(
        "chunk-topk",
        "Chunk top-k",
        "SparseLoCo, 2025 (its selector alone)",
        "the largest entries of every chunk of each tensor; the rest is remembered",
        codec="chunk-topk",
        defaults={"feedback": True, "codec.density": 0.01, **codec_settings("chunk-topk", "chunk")},
    ),
    _pair(
        "threshold",
        "Threshold",
        "the simplest sparsifier; no single source",
        "the entries whose magnitude exceeds a fixed level, however many these are; the rest is remembered",
        codec="threshold",
        defaults={"feedback": True, "codec.level": 0.05},
    ),
    _pair(
        "dgc",
        "Deep gradient compression",
        "Lin et al. 2018, Deep gradient compression: reducing the communication bandwidth for distributed training",
        "the largest entries of a velocity that each client accumulates with momentum; many at first, few after a "
        "warm-up",
        codec="dgc",
        defaults={"feedback": False, "codec.density": 0.01, **codec_settings("dgc", "momentum", "warmup")},
    ),
    _pair(
        "adacomp",
        "AdaComp",
        "Chen et al. 2018, AdaComp: adaptive residual gradient compression for data-parallel distributed training",
        "per bin of each tensor the entries that the update carries to the bin's largest, as signs with one scale; the "
        "rest is remembered",
        codec="adacomp",
        defaults={"feedback": False, **codec_settings("adacomp", "bin", "conv_bin")},
    ),
    _pair(
        "sidco",
        "SIDCo",
        "Abdelmoniem et al. 2021, An efficient statistical-based gradient compression technique for distributed "
        "training systems",
        "the entries above a threshold that is estimated from moments of the magnitudes; the rest is remembered",
        codec="sidco",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    _pair(
        "keyregion",
        "Key regions",
        "derived here; stands in for Guo, Liu, Zhang 2021 (Sensors 21, 1943), whose predictor is not public",
        "a larger fraction of the blocks that hold most of the energy, above thresholds from running histograms; the "
        "rest is remembered",
        codec="keyregion",
        defaults={"feedback": True, **codec_settings("keyregion", "key_density", "sparse_density")},
    ),
    _pair(
        "stc",
        "Sparse ternary compression",
        "Sattler et al. 2020, Robust and communication-efficient federated learning from non-i.i.d. data",
        "the signs of the largest entries and their mean magnitude; the rest is remembered",
        codec="stc",
        defaults={"feedback": True, "codec.density": 0.01},
    ),
    _pair(
        "qsgd",
        "QSGD",
        "Alistarh et al. 2017, QSGD: communication-efficient SGD via gradient quantization and encoding",
        "every entry of the update, randomly rounded to a few levels per bucket",
        codec="qsgd",
        defaults={"feedback": False},
    ),
    _pair(
        "eden",
        "EDEN",
        "Vargaftik et al. 2022, EDEN: communication-efficient and robust distributed mean estimation for federated "
        "learning",
        "every entry of the update after a random rotation of each client's own, rounded to one to four bits; unbiased",
        codec="eden",
        defaults={"feedback": False, **codec_settings("eden", "bits")},
    ),
    _pair(
        "diloco",
        "DiLoCo",
        "Douillard et al. 2023, DiLoCo: distributed low-communication training of language models",
        "after many local steps one bit for every entry of the update, in both directions; the server steps by "
        "Nesterov's momentum",
        codec="eden",
        defaults={
            "feedback": False,
            **codec_settings("eden", "bits"),
            **OUTER,
            "downlink": "eden",
            "downlink.scale": "least",
        },
    ),
    _pair(
        "sparseloco",
        "SparseLoCo",
        "Sarfi et al. 2025, Communication efficient LLM pre-training with SparseLoCo; its outer step is derived here",
        "after many local steps the largest entries of every chunk in two bits; the rest is remembered and decays; the "
        "server steps by Nesterov's momentum",
        codec="chunk-topk",
        defaults={
            "feedback": True,
            "feedback.decay": 0.95,
            "codec.density": 1 / 64,
            "codec.values": "q2",
            **codec_settings("chunk-topk", "chunk"),
            **OUTER,
            "downlink": "chunk-topk",
            "downlink.density": 1 / 16,
            "downlink.values": "q2",
        },
    ),
    System(
        "demo",
        "DeMo",
        "Peng, Quesnelle, Kingma 2024, Decoupled momentum optimization",
        "after every step the largest cosines of each client's momentum; the rest of it stays with the client, and the "
        "server steps by the sign of the mean",
        _demo,
        {**_COSINES, **_SIGNS, "downlink": "scaledsign"},
        PAIR_PREFIXES,
    ),
    System(
        "auto",
        "Auto",
        "none; derived here: reverse water-filling by one step, coded in contexts of rows and columns",
        "every entry of the update at one step, the shortest that keeps the budget; unbiased, or rounded and "
        "remembered where so few bits from so few clients ask for it",
        partial(build_pair, codec="auto", feedback=None),
        {"downlink": ""},
        PAIR_PREFIXES,
    ),
    _pair(
        "projection",
        "Random projections",
        "FedMPDD (arXiv:2512.20814, abstract): several projections of a gradient; the codec is derived here",
        "products of the update with a few random directions of signs of each client's own; the rest is remembered",
        codec="projection",
        defaults={"feedback": True, **codec_settings("projection", "directions"), "codec.scale": "least"},
    ),
    _pair(
        "fft",
        "FFT sparsification",
        "Wang et al. 2020, FFT-based gradient sparsification for the distributed training of deep neural networks",
        "the largest coefficients of each tensor's Fourier transform, as floats of 8 bits whose exponents cover the "
        "range of the values; nothing is remembered unless asked for",
        codec="fft",
        defaults={"feedback": False, "codec.order": "HWDF", **codec_settings("fft", "density", "values")},
    ),
    _pair(
        "factors",
        "dAD, edAD, rank-dAD",
        "Baker, Calhoun, Pearlmutter, Plis 2022, Peering beyond the gradient veil with distributed auto "
        "differentiation",
        "of every matrix few outer products near the update's (rank-dAD), or those it is the sum of (dAD, edAD)",
        codec="factors",
        defaults={"feedback": False, **codec_settings("factors", "mode", "rank")},
    ),
    _pair(
        "terngrad",
        "TernGrad",
        "Wen et al. 2017, TernGrad: ternary gradients to reduce communication in distributed deep learning",
        "every entry of the update, randomly rounded to zero or plus or minus the largest magnitude of its tensor",
        codec="terngrad",
        defaults={"feedback": False, **codec_settings("terngrad", "clip")},
    ),
    _pair(
        "natural",
        "Natural compression",
        "Horváth et al. 2019, Natural compression for distributed deep learning",
        "every entry of the update, randomly rounded to a power of two: sign and exponent",
        codec="natural",
        defaults={"feedback": False},
    ),
    _pair(
        "efsignsgd",
        "EF-signSGD",
        "Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression schemes",
        "the sign of every entry and each tensor's mean magnitude; what that gets wrong is remembered",
        codec="scaledsign",
        defaults={"feedback": True},
    ),
    _pair(
        "signsgd",
        "signSGD with majority vote",
        "Bernstein et al. 2018, signSGD: compressed optimisation for non-convex problems",
        "the sign of every entry as a vote; all entries move by the same step towards the majority",
        codec="signsgd",
        defaults={"feedback": False, "codec.step": 0.002},
    ),
    _pair(
        "fixedpoint",
        "Fixed point",
        "none; the preparation of updates for sums of integers",
        "entries drawn at random, the same on all clients, randomly rounded to integers on one grid; the rest is "
        "remembered",
        codec="fixedpoint",
    ),
)
