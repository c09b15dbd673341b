"""How fast does mctx search? The counterpart of benchmarks/search.py: the same network, actions and simulations.

    pip install -r benchmarks/requirements-peers.txt          # on a GPU also jax's CUDA plugin, see benchmarks/peers.md
    python benchmarks/peers.py
    python benchmarks/peers.py --trees 256 --repeats 3
    python benchmarks/search.py --csv search.csv              # ours, on the same machine
    python benchmarks/peers.py --ours search.csv              # both side by side

A network 128-128 takes a hidden vector and an action to the next hidden vector; three heads give logits, value and
reward. jit compiles the whole search; each measurement waits for the device (block_until_ready).
"""

import csv
import dataclasses
import itertools
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stag_hunt_env import NUM_ACTIONS, Count, UserError, check_ranges, command_line, parse

WARM_UP = 5  # searches that are not counted
POLICIES = {"puct": "muzero_policy", "gumbel": "gumbel_muzero_policy"}  # our --root: mctx's name


@dataclasses.dataclass
class Args:
    trees: tuple[int, ...] = (256, 1024, 4096, 16384)
    """trees at once (mctx: the batch)"""
    simulations: Count = 32
    """simulations per tree"""
    width: Count = 128
    """of the network"""
    repeats: Count = 20
    """searches to take the median of"""
    device: str = "auto"
    """auto, cpu or cuda"""
    ours: str | None = None
    """CSV file of benchmarks/search.py --csv, to print beside"""


def make_search(args: Args, root: str, trees: int):
    """-> a function of no arguments that searches once and waits for the device"""
    import jax
    import jax.numpy as jnp
    import mctx

    keys = jax.random.split(jax.random.key(1), 4)

    def weights(key, inputs, outputs):
        return jax.random.normal(key, (inputs, outputs)) / inputs**0.5

    params = {
        "first": weights(keys[0], args.width + NUM_ACTIONS, args.width),
        "second": weights(keys[1], args.width, args.width),
        "heads": weights(keys[2], args.width, NUM_ACTIONS + 2),
    }
    start = jax.random.normal(keys[3], (trees, args.width))

    def judge(params, hidden):  # [B, width] -> logits [B, A], value [B]
        out = hidden @ params["heads"]
        return out[:, :NUM_ACTIONS], out[:, -2]

    def recurrent(params, key, action, hidden):
        inputs = jnp.concatenate([hidden, jax.nn.one_hot(action, NUM_ACTIONS)], 1)
        hidden = jax.nn.relu(jax.nn.relu(inputs @ params["first"]) @ params["second"])
        logits, value = judge(params, hidden)
        reward, discount = hidden[:, 0] * 0.01, jnp.full(trees, 0.99)
        output = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
        return output, hidden

    @jax.jit
    def search(params, key):
        logits, value = judge(params, start)
        roots = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=start)
        policy = getattr(mctx, POLICIES[root])
        return policy(params, key, roots, recurrent, num_simulations=args.simulations).action_weights

    numbers = itertools.count()
    return lambda: jax.block_until_ready(search(params, jax.random.key(next(numbers))))


def measure(args: Args, root: str, trees: int) -> float:
    """Seconds of one search of all trees"""
    search, taken = make_search(args, root, trees), []
    for _ in range(WARM_UP + args.repeats):
        begun = time.perf_counter()
        search()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[WARM_UP:]))


def main(args: Args) -> dict[str, float]:
    check_ranges(args)
    if min(args.trees) < 1:
        raise UserError(f"--trees must be >= 1, not {min(args.trees)}")
    try:
        import jax
        import mctx
    except ImportError as error:
        install = "pip install -r benchmarks/requirements-peers.txt"
        raise UserError(f"there is no {error.name} here, which this comparison needs: {install}") from error
    if args.device != "auto":
        jax.config.update("jax_platforms", args.device)
    ours, rates = {}, {}
    if args.ours:
        with open(args.ours, newline="") as file:
            ours = {
                (row["root"], int(row["trees"])): float(row["simulations_per_second"]) for row in csv.DictReader(file)
            }
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, mctx {mctx.__version__}, {args.simulations} simulations,", end=" ")
    print(f"medians of {args.repeats}; million simulations/s")
    for root, trees in itertools.product(POLICIES, args.trees):
        seconds = measure(args, root, trees)
        rates[f"{root}/{trees}"] = rate = trees * args.simulations / seconds
        beside = f"   ours {ours[root, trees] / 1e6:9.3f}" if (root, trees) in ours else ""
        print(f"{POLICIES[root]:<20} {trees:>6} trees {1000 * seconds:9.3f} ms {rate / 1e6:9.3f}{beside}", flush=True)
    return rates


def parse_args(words: list[str]) -> Args:
    return parse(Args, {"peers": Args}, Args(), words)


if __name__ == "__main__":
    command_line(parse_args, main)
