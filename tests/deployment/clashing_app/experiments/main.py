"""The server: prints what arrived, where the library is, and what it cost."""

from coding.numbers import zeros
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from strategies.mine import Mine

import clients
import coding
import fedcomp
import strategies
from fedcomp.codecs import TopK
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.compressed import Compressed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    metered = MeteredGrid(grid)
    strategy = Compressed(Mine(fraction_evaluate=0.0), TopK(density=0.01))
    result = strategy.start(metered, ArrayRecord(list(zeros().values())), num_rounds=int(context.run_config["rounds"]))
    (weight,) = result.arrays.to_numpy_ndarrays()
    traffic = metered.ledger.summary()
    print("own", *(module.__file__ for module in (strategies, clients, coding)), flush=True)
    print("library", fedcomp.__file__, flush=True)
    print("sum", float(weight.sum()), flush=True)
    print("bytes", traffic["payload_up"], traffic["payload_down"], flush=True)
