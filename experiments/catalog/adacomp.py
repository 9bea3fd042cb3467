"""AdaComp: which compression ratio results on convolutional and fully connected layers when none is set?"""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.adacomp import study
from fedcomp.rules import Int

# A bin of a few elements compresses badly, so the smallest tensors, together 1 % of the model, stay dense.
_ADACOMP: Final = "adacomp codec.conv_bin={codec.conv_bin} codec.bin={codec.bin} policy.share="

EXPERIMENT = Experiment(
    name="adacomp",
    question="Does AdaComp find its own compression ratio, and which one on convolutional and fully connected layers?",
    task="mnist",
    each=lambda config: f"evaluate_every={max(1, -(-config.rounds // 3))}",
    rows={
        "FedAvg": "fedavg",
        "AdaComp": f"{_ADACOMP}0.01",
        "AdaComp, factor 1": f"{_ADACOMP}0.01 codec.factor=1.0",
        # Ranked within each layer, because AdaComp's bins lie within a layer. This makes the layers comparable.
        "top-k with feedback": ("topk feedback=true codec.density={codec.density} codec.scope=layer policy.share=0.01"),
        # At a share of 1 every tensor below the policy's minimum size stays dense, regardless of their total size.
        "AdaComp, small layers dense": f"{_ADACOMP}1.0",
    },
    options={
        "task.train_examples": Option(6000, Int(1), "training images used, of all clients together"),
        "task.partition": "iid",
        "lr": 0.1,
        "batch_size": 64,
        "max_steps": 1,
        "codec.conv_bin": Option(50, Int(1), "AdaComp: elements per bin of convolutional layers"),
        "codec.bin": Option(500, Int(1), "AdaComp: elements per bin of the other layers"),
        # Of top-k.
        "codec.density": 0.003,
    },
    study=study,
    title="Train loss and whole frames",
    columns={
        "train loss, nats": "train loss, nats",
        "times dense": "train loss over that of dense averaging",
        "test accuracy, %": "final test, %",
        "times fewer bytes, all": "times fewer up",
    },
    caption="Loss of the final model on all training images. The last column counts whole payloads, including the "
    "tensors that travel dense.",
    claims="""
        AdaComp, small layers dense | train loss over that of dense averaging | <= 1.1 | gate: goal of this package
        AdaComp | train loss over that of dense averaging | <= 1.1 | goal: of this package; the policy compresses the
            output layer, 640 weights in two bins
        AdaComp | times fewer encoded bytes in convolutional layers | >= 40.0 | gate: goal of this package, with bins of
            50; the paper's abstract: about 40x on convolutional layers
        AdaComp | times fewer encoded bytes in fully connected layers | >= 150.0 | gate: goal of this package, with bins
            of 500; the paper's abstract: about 200x on fully connected and recurrent layers
        AdaComp | elements sent per bin of fully connected layers, first tenth over last | >= 1.5 | gate: measured 2.9
            to 5.7 over seeds 0 to 2 with MNIST's files, 0 and 1 without; a fixed ratio gives 1
        AdaComp, factor 1 | bytes of fully connected layers, first tenth over last | <= 1.1 | gate: derived:
            without the look-ahead only the largest element of a bin can travel
        AdaComp | weights of the run without messages that differ from the run with them | == 0.0 | gate: theory: the
            same arithmetic, so the figures per bin are valid for the row
    """,
    answer=(
        "AdaComp sends {AdaComp | times fewer encoded bytes in convolutional layers:.0f} times fewer bytes in the "
        "convolutional layer and {AdaComp | times fewer encoded bytes in fully connected layers:.0f} times fewer "
        "bytes in the fully connected layer, at {AdaComp | train loss over that of dense averaging:.2f} times the "
        "train loss of dense averaging, and "
        "{AdaComp, small layers dense | train loss over that of dense averaging:.2f} times where layers below 1024 "
        "elements stay dense."
    ),
    rounds=150,
    clients=4,
    minutes=3.2,
    quick=("rounds=3", "clients=2", "task.train_examples=40", "batch_size=8"),
    notes=(
        "The data are MNIST where its files are found, otherwise the embedded 8x8 digits enlarged to 28x28, which "
        "have a quarter of the images and are easier. The section on data says which were used. The network has two "
        "convolutions, a fully connected layer and an output layer, 114 314 parameters. The second convolution (12 "
        "800 weights), the fully connected layer (100 352) and the output layer (640) are compressed. The smallest "
        "tensors, up to 1 % of the model, travel dense: the first convolution (400 weights) and the biases. So the "
        "ratio of convolutional layers comes from one layer. Dense tensors make up much of a compressed reply, so the "
        "ratio of whole payloads in the first table is below the ratios of the layers. The output layer has only two "
        "bins, and the claims about ratios cover layers of at least 20 bins. One row leaves all layers below 1024 "
        "elements dense; it shows what compressing the output layer costs.\n\n"
        "AdaComp has a bin length as a setting and no ratio. In each bin it sends the elements that one more update "
        "of the same size would lift to the bin's largest magnitude. With factor 1 there is no such look-ahead, and "
        "only the largest element of each bin is sent. Top-k's density is set by hand so that its layers take about "
        "as many bytes as AdaComp's."
    ),
)
