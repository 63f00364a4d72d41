"""Statistics of what an engine would keep in its KV cache, gathered while the model runs over the calibration tokens.

Shape suffixes: N = sequences, S = tokens.
"""

from collections.abc import Callable

from torch import Tensor

from kvq.calibration.activations import ActivationStore
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_stats import KvStatistics
from kvq.calibration.whole_layer import whole_layer


def gather_statistics(runner: ModelRunner, tokens_NS: Tensor, stage: Callable[[str], None]) -> KvStatistics:
    """One pass of the whole model over the tokens, layer by layer, an MTP layer included.

    Raises CalibrationError when a layer's output is not finite.
    """
    statistics = KvStatistics(runner.facts.arch.attention)
    store: ActivationStore = runner.embed(tokens_NS)
    total = runner.facts.num_layers + runner.facts.num_mtp_layers
    for layer in range(total):
        stage(f"layer {layer + 1}/{total}")
        if layer in runner.facts.mtp_layers:
            if tokens_NS.shape[1] < 2:
                break
            store = runner.mtp_input(layer, tokens_NS, store)
        runner.run(whole_layer(runner, layer, statistics.observe), layer, store)
        runner.reader.release()
    return statistics
