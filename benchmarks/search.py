"""How fast do the trees of hopplus_mcts.py grow, with nothing in them but a small network?

    python benchmarks/search.py                          # on the GPU if there is one
    python benchmarks/search.py --no-compile             # without torch.compile, which takes a minute or two at the start
    python benchmarks/search.py --trees 256 --repeats 3

The model is an MLP 128-128 whose hidden vector is the position, as in mctx's own comparison (`shared/figures.md`): what is
measured is the search. With the game, MOA and subgoals in it: `python hopplus_mcts.py --profile --num-envs 4096 --num-trees 1
--num-simulations 32 --search-model env --compile --precision bf16`.
"""

import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hopplus_mcts as hop
from stag_hunt_env import NUM_ACTIONS, command_line, resolve_device


@dataclasses.dataclass
class Args:
    trees: tuple[int, ...] = (256, 1024, 4096, 16384)
    """trees at once"""
    simulations: int = 32
    """simulations per tree"""
    width: int = 128
    """of the network"""
    repeats: int = 20
    """searches to take the median of"""
    compile: bool = True
    """on a GPU: fuse the network and, as hopplus_mcts.py --compile does, parts of the search"""
    device: str = "auto"
    """auto, cpu or cuda"""


def measure(args: Args, root: str, trees: int, device) -> float:
    """median seconds of one search of all trees"""
    search_args = hop.resolved(hop.Args(root=root, device=device.type, max_depth=args.simulations, compile=args.compile))
    generator = torch.Generator(device).manual_seed(1)

    def weights(inputs, outputs):
        return torch.randn(inputs, outputs, generator=generator, device=device) / inputs**0.5

    first, second = weights(args.width + NUM_ACTIONS, args.width), weights(args.width, args.width)
    heads, eye = weights(args.width, NUM_ACTIONS + 2), torch.eye(NUM_ACTIONS, device=device)
    start = torch.randn(trees, args.width, generator=generator, device=device)
    nothing, never = start[:, :0], torch.zeros(trees, dtype=torch.bool, device=device)
    table = hop.halving(args.simulations, device)

    def judge(board):
        out = board @ heads
        return out[:, :NUM_ACTIONS].log_softmax(1), out[:, -2]

    def move(board, action):
        x = torch.relu(torch.cat([board, eye[action]], 1) @ first)
        x = torch.relu(x @ second)
        return x, x[:, 0] * 0.01

    judge, move = (hop.fused(function, search_args, device) for function in (judge, move))

    def evaluate(position):
        return hop.Leaf(*judge(position.board), nothing.view(trees, 0, NUM_ACTIONS), position)

    def advance(position, joint):
        board, reward = move(position.board, joint[:, 0])
        return position._replace(board=board), reward, never

    def search():
        uniform = torch.rand(args.simulations, trees, 0, generator=generator, device=device)
        gumbel = -(-torch.rand(trees, NUM_ACTIONS, generator=generator, device=device).clamp(1e-6, 1 - 1e-6).log()).log()
        leaf = evaluate(hop.Position(start, *[nothing] * 5))
        return hop.search(search_args, 5.0, leaf, never, advance, evaluate, uniform, gumbel, table, lambda _: None)

    call, taken = hop.graphed(search, (generator,), True), []
    for _ in range(args.repeats + 5):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return sorted(taken[5:])[args.repeats // 2]


def main(args: Args) -> dict[str, float]:
    device, found = resolve_device(args.device), {}
    numbers = {"trees": min(args.trees), "simulations": args.simulations, "width": args.width, "repeats": args.repeats}
    for name, least in numbers.items():
        if least < 1:
            raise ValueError(f"--{name} must be >= 1, not {least}")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {args.simulations} simulations, medians of {args.repeats}")
    for root in ("puct", "gumbel"):
        for trees in args.trees:
            seconds = measure(args, root, trees, device)
            found[f"{root}/{trees}"] = rate = trees * args.simulations / seconds
            print(f"{root:<7} {trees:>6} trees {1000 * seconds:9.3f} ms {rate / 1e6:9.3f} M simulations/s", flush=True)
    return found


if __name__ == "__main__":
    command_line(Args, main)
