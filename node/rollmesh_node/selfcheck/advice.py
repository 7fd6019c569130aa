"""The words for each thing that a selfcheck can find: what it is, what it likely comes from, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollmesh_node.selfcheck.findings import Kind


@dataclass(frozen=True)
class Advice:
    """Three sentences without a full stop."""

    what: str
    likely: str
    do: str


_DEFAULTS: Final = "give the GPU its factory clocks and voltages, watch its temperature, test its memory"

ADVICE: Final[Mapping[Kind, Advice]] = {
    "not_finite": Advice(
        "log-probabilities are not numbers, or above zero",
        "the arithmetic overflows: a dtype that this device cannot do, damaged memory, or an overclocked GPU",
        f"set engine.dtype=bfloat16, or float32 on an old CPU; {_DEFAULTS}; then start the node again",
    ),
    "eos": Advice(
        "completions do not end where the model ends them",
        "the engine has other stop tokens than the run, stops before it draws one, or goes on after it",
        "update rollmesh; an engine of your own must end at the first stop token that it draws, and include it",
    ),
    "form": Advice(
        "results are not well formed",
        "an engine or a rollmesh of another version",
        "update rollmesh; if it goes on, report it with the engine that `rollmesh status` shows",
    ),
    "temperature": Advice(
        "the engine samples at another temperature than 1",
        "a sampling setting of the engine's own, such as a generation_config.json that it obeys",
        "remove it: prompt, seed and temperature are the lease's alone",
    ),
    "greedy": Advice(
        "the engine takes the most likely token and adds no noise",
        "greedy decoding without the seeded noise: the sampler of rollmesh is not in the engine",
        "update rollmesh and install the engine again: pip install 'rollmesh[engine]'",
    ),
    "truncation": Advice(
        "the engine never draws unlikely tokens",
        "top-k, top-p or min-p in the engine's sampling settings or in a generation_config.json",
        "remove it: a lease is drawn from the whole distribution",
    ),
    "seed": Advice(
        "the tokens are plausible, and not those of the lease's seeds",
        "the engine draws with noise of its own: the seed is ignored, or counted from another position",
        "update rollmesh and install the engine again: pip install 'rollmesh[engine]'",
    ),
    "weights": Advice(
        "the engine computes with other weights than it is given",
        "weights quantised to 4 bits, another model, an adapter, or weights damaged in memory",
        "use the engine without quantisation; stop the node and start it again, so that its weights are loaded anew",
    ),
    "quantised": Advice(
        "the engine computes more coarsely than honest engines do",
        "weights or the cache quantised to 8 bits, fp16 or fp8 arithmetic, or weights that are some versions old",
        "set engine.dtype=bfloat16 and switch quantisation off; then start the node again",
    ),
    "stale": Advice(
        "what was sent was made with other weights than the lease named",
        "the engine kept old weights over a change, or they were damaged in memory (overclocked or failing memory)",
        f"start the node again, which loads the weights anew; if it comes back: {_DEFAULTS}",
    ),
    "logprobs": Advice(
        "the tokens are right, and the log-probabilities beside them are not",
        "they are taken after temperature, truncation or noise, or in another dtype than the tokens are drawn in",
        "report log softmax(logits) of each token, before anything else; update rollmesh",
    ),
    "shift": Advice(
        "the tokens are right, and the log-probabilities beside them are shifted by a constant",
        "they are not normalised over the whole vocabulary (truncation), or were changed on purpose",
        "report log softmax(logits) of each token, over the whole vocabulary; update rollmesh",
    ),
    "tokens": Advice(
        "some tokens are not the ones that these weights and these seeds give",
        "tokens edited or drawn again after sampling, a cache that mixes sequences up, or now and then a wrong number "
        "from an overclocked GPU",
        f"{_DEFAULTS}; run the selfcheck with --recompute-on cpu; update rollmesh",
    ),
    "drift": Advice(
        "over many tokens the sampling is further from these weights than honest engines are",
        "weights in 8 bits or some versions old, fp16 or fp8 arithmetic, a temperature close to 1, top-p, or an "
        "overclocked GPU that is sometimes wrong",
        f"set engine.dtype=bfloat16, switch quantisation and sampling settings off; {_DEFAULTS}",
    ),
    "unstable": Advice(
        "this machine does not give the same numbers twice",
        "an overclocked, overheated or failing GPU, or failing memory: nothing that it computes can be relied on",
        f"{_DEFAULTS}; run the selfcheck with --recompute-on cpu to compare",
    ),
    "late": Advice(
        "results come too late",
        "leases count elapsed time, by no clock on the wall: the PC slept, was busy with something else, or is too "
        "slow for what it takes at once",
        "lower limits.groups_at_once and engine.max_batch_samples; keep the PC awake while the node runs",
    ),
    "engine": Advice(
        "the engine fails when it generates",
        "the words above; mostly memory, the GPU's driver, or a GPU that computes nonsense",
        f"close other programs, or lower engine.max_batch_samples; {_DEFAULTS}",
    ),
}
