"""Advice of private strategies and of what they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from advice import (
    CODED,
    DENSE,
    KEY,
    NODES,
    PLAN,
    PRIVATE,
    PROMISE,
    VALUES,
    Row,
    decoded,
    ended,
    ledger,
    local,
    quiet,
    row,
    shares,
    trains,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedMedian,
)
from toy import fedavg

from fedcomp.clients.private.lsg import lsg
from fedcomp.clients.private.mod import private
from fedcomp.codecs import (
    QSGD,
    TopK,
)
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign, topk_stochastic_sign
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.settings import LsgSettings
from fedcomp.strategies.private.topagg import TopAgg

BALLOT = TopkSign(k=50)


def noise_shares(**options: Any) -> DistributedSum:
    given = {"noise_multiplier": 1.0, "clip": 1.0, "size": 100, "contributors": 4, "noise": "discrete_gaussian"}
    return DistributedSum(**{**given, **options})


NOISE = Event("gaussian", noise_multiplier=1.0)


def rounds_of(found: PrivacyLedger, rounds: int, nodes: Any = (1, 2), event: Event = NOISE) -> bool:
    for number in range(1, rounds + 1):
        found.record(event, round=number, participants=list(nodes))
    return found.epsilon() > 0


PRIVACY = (
    row(
        "strategies/private/promise.py",
        "A codec goes outside: Compressed({}(...), codec)",
        lambda: DpFedAvg(Compressed(quiet(), TopK(0.1)), clip=1.0, **PROMISE),
        lambda: trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE),
    ),
    row(
        "strategies/private/promise.py",
        "make the inner strategy with fraction_evaluate=0.0",
        lambda: DpFedAvg(fedavg(), clip=1.0, **PROMISE),
        lambda: trains(DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "strategies/private/promise.py",
        "leave it at 1.0 and give sampling=Sampling(...)",
        lambda: DpFedAvg(quiet(fraction_train=0.5), clip=1.0, **PROMISE),
        lambda: trains(
            DpFedAvg(quiet(fraction_train=1.0), clip=1.0, sampling=Sampling("poisson", rate=0.9), **PROMISE),
            PRIVATE,
            rounds=4,
        ),
    ),
    row(
        "strategies/private/promise.py",
        "is not known: give population=N",
        lambda: ended(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": 0}), PRIVATE),
        lambda: trains(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": NODES}), PRIVATE),
    ),
    row(
        "strategies/private/dp_fedavg.py",
        "adaptive clipping needs Gaussian noise; use noise='discrete_gaussian'",
        lambda: DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="skellam", **PROMISE),
        lambda: trains(
            DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="discrete_gaussian", **PROMISE), PRIVATE
        ),
    ),
    row(
        "strategies/private/flower_dp.py",
        "Put it inside: {}({}(FedAvg(...), ...), codec)",
        lambda: ended(DifferentialPrivacyServerSideFixedClipping(Compressed(quiet(), QSGD(7)), 0.1, 1.0, 4)),
        lambda: trains(Compressed(DifferentialPrivacyServerSideFixedClipping(quiet(), 0.1, 1.0, 4), QSGD(7))),
    ),
    row(
        "strategies/private/local_dp.py",
        "is the one that is not trusted. Use sampling='capped' or 'everyone'",
        lambda: local(sampling=Sampling("poisson", rate=0.5)),
        lambda: (
            trains(local(sampling=Sampling("capped", cap=9)), PRIVATE)
            and trains(local(sampling=Sampling("everyone")), PRIVATE)
        ),
    ),
    row(
        "strategies/private/lsg.py",
        "Lsg sends bytes of its own; use it without Compressed, or DpFedAvg with a codec",
        lambda: Compressed(Lsg(quiet(), LsgSettings(clip=1.0, rank=2), **PROMISE), TopK(0.1)),
        lambda: (
            trains(Lsg(quiet(), LsgSettings(clip=1.0, rank=2), **PROMISE), (lsg, private))
            and trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE)
        ),
    ),
    row(
        "strategies/private/topagg.py",
        "is a threshold, which mode={} does not have; use mode='threshold'",
        lambda: TopAgg(quiet(), BALLOT, server_lr=0.1, mode="mean", beta=0.5, **PROMISE),
        lambda: trains(TopAgg(quiet(), BALLOT, server_lr=0.1, mode="threshold", beta=0.1, **PROMISE), (private,)),
    ),
    row(
        "strategies/private/distributed_dp.py",
        "use Sampling('capped') or everyone",
        lambda: shares(sampling=Sampling("poisson", rate=0.5)),
        lambda: trains(shares(sampling=Sampling("everyone")), CODED),
    ),
    row(
        "strategies/private/record_dp.py",
        "is no weighted mean; use one of {}, or Compressed around one",
        lambda: RecordDp(quiet(FedMedian), PLAN, records=100),
        lambda: RecordDp(quiet(), PLAN, records=100) and RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "evaluation on clients would release metrics of their records; make",
        lambda: RecordDp(fedavg(), PLAN, records=100),
        lambda: RecordDp(fedavg(fraction_evaluate=0.0), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "checks the updates: write Compressed(..., guard=...) around the mean",
        lambda: RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100, guard=Norms()),
        lambda: RecordDp(Compressed(quiet(), TopK(0.1), guard=Norms()), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "RecordDp inside of Compressed would book no training: put it outside",
        lambda: Compressed(RecordDp(quiet(), PLAN, records=100), TopK(0.1)),
        lambda: RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "the plan says; use one of the two",
        lambda: RecordDp(DpFedAvg(quiet(), clip=1.0, **PROMISE), PLAN, records=100),
        lambda: RecordDp(quiet(), PLAN, records=100) and DpFedAvg(quiet(), clip=1.0, **PROMISE),
    ),
    row(
        "strategies/forward.py",
        "slopes are neither. Use a codec without forward gradients",
        lambda: ForwardGradients(DpFedAvg(quiet(), clip=1.0, **PROMISE), 8),
        lambda: Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)),
    ),
)


PRIVATE_PARTS = (
    row(
        "fedcomp/privacy/sampling.py",
        "say sampling='poisson', or leave the rate out",
        lambda: Sampling("everyone", rate=0.5),
        lambda: Sampling("poisson", rate=0.5) and Sampling("everyone"),
    ),
    row(
        "fedcomp/privacy/sampling.py",
        "does not fit Poisson sampling, whose rounds vary in size; use its rate",
        lambda: Sampling("poisson", rate=0.5).check("zero_out", count=3),
        lambda: Sampling("poisson", rate=0.5).check("zero_out") is None,
    ),
    row(
        "fedcomp/privacy/sampling.py",
        "sampling='poisson' with rate = count / population, or adjacency='replace'",
        lambda: Sampling().check("add_remove", count=3),
        lambda: [Sampling("poisson", rate=3 / 9).check("add_remove"), Sampling().check("replace", count=3)],
    ),
    row(
        "fedcomp/privacy/votes.py",
        "pass uniforms=Key(...) or an array, or stochastic=False",
        lambda: topk_stochastic_sign(VALUES, 10),
        lambda: all(
            np.count_nonzero(topk_stochastic_sign(VALUES, 10, **how)) == 10
            for how in ({"uniforms": KEY}, {"uniforms": np.full(10, 0.5)}, {"stochastic": False})
        ),
    ),
    row(
        "fedcomp/privacy/votes.py",
        "give either k or density, the number of votes",
        lambda: TopkSign(),
        lambda: decoded(TopkSign(k=10)).size and decoded(TopkSign(density=0.1)).size,
    ),
    row(
        "fedcomp/privacy/votes.py",
        "with at least one each; raise k, or use ",
        lambda: decoded(TopkSign(k=1, scope="layer")),
        lambda: decoded(TopkSign(k=2, scope="layer")).any() and decoded(TopkSign(k=1, scope="global")).any(),
    ),
    row(
        "fedcomp/privacy/votes.py",
        "use scope='layer', or a policy of only None and 1.0",
        lambda: decoded(TopkSign(k=10), layout=DENSE),
        lambda: decoded(TopkSign(k=10, scope="layer"), layout=DENSE).any() and decoded(TopkSign(k=10)).any(),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "shares of noise are integers: use noise='discrete_gaussian' or 'skellam'",
        lambda: noise_shares(noise="gaussian"),
        lambda: noise_shares(noise="discrete_gaussian") and noise_shares(noise="skellam"),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "Use adjacency='zero_out' or 'replace'",
        lambda: noise_shares(adjacency="add_remove"),
        lambda: noise_shares(adjacency="zero_out") and noise_shares(adjacency="replace"),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "nobody's is left to count on; lower tolerated, or ask more clients",
        lambda: noise_shares(tolerated=4),
        lambda: noise_shares(tolerated=1) and noise_shares(tolerated=4, contributors=6),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "Raise scale (now {}), or use noise='skellam'",
        lambda: noise_shares(noise_multiplier=0.01, scale=1),
        lambda: (
            noise_shares(noise_multiplier=0.01, scale=1 << 12)
            and noise_shares(noise_multiplier=0.01, scale=1, noise="skellam")
        ),
    ),
    row(
        "fedcomp/privacy/entropy.py",
        "Leave the seed out, or say insecure_deterministic=True",
        lambda: SeededEntropy(KEY),
        lambda: (
            SeededEntropy(KEY, insecure_deterministic=True).words(2).size == 2
            and trains(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "insecure_deterministic": False}), PRIVATE)
            and trains(DpFedAvg(quiet(), clip=1.0, seed=7, **PROMISE), PRIVATE)
        ),
    ),
)


LEDGERS = (
    row(
        "fedcomp/privacy/ledger.py", "would satisfy it. Use at ", lambda: ledger(delta=0.2), lambda: ledger(delta=1e-2)
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "participants, the population was declared as {}. Declare the number of all",
        lambda: rounds_of(ledger(population=1), 1),
        lambda: rounds_of(ledger(population=2), 1),
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "Nothing was released: end the run, or plan it with more noise",
        lambda: rounds_of(ledger(budget=6.0), 9),
        lambda: rounds_of(ledger(budget=6.0), 9, event=Event("gaussian", noise_multiplier=9.0)),
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "the cap is {}; choose participants by ",
        lambda: rounds_of(ledger(sampling=Sampling("capped", cap=1)), 2),
        lambda: rounds_of(ledger(sampling=Sampling("capped", cap=1)), 1),
    ),
    row(
        "fedcomp/privacy/adaptive.py",
        "Set count_noise above {}, or have more than {} clients",
        lambda: AdaptiveClip(count_noise=0.01).sum_multiplier(1.0, 4),
        lambda: AdaptiveClip(count_noise=0.6).sum_multiplier(1.0, 4) > 1.0,
    ),
)


ROWS: tuple[Row, ...] = (
    *PRIVACY,
    *PRIVATE_PARTS,
    *LEDGERS,
)
