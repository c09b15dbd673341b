"""How fast do the trees of hopplus_mcts.py grow, where does the time of a search go, and what does a tree look like?

    python benchmarks/search.py                               # nothing in the trees but a small network
    python benchmarks/search.py --trees 256 --repeats 3 --no-compile
    python benchmarks/search.py --csv search.csv              # also to a file, for benchmarks/peers.py --ours
    python benchmarks/search.py --profile -- --num-envs 4096 --num-trees 1 --num-simulations 32 --search-model env \
        --compile --precision bf16                            # with game, MOA and subgoals; flags of hopplus_mcts.py
    python benchmarks/search.py --profile --checkpoint runs/RUN/checkpoint.pt
    python benchmarks/search.py --draw tree.png --checkpoint runs/RUN/checkpoint.pt -- --num-simulations 32

The small network is an MLP 128-128 whose hidden vector is the position, as in mctx's own comparison. Without
--checkpoint the networks of --profile and --draw are fresh. torch.compile takes a minute or two at the start.
"""

import csv
import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hopplus_mcts as hop
from stag_hunt_env import (
    ACTION_NAMES,
    NUM_ACTIONS,
    Count,
    StagHuntConfig,
    UserError,
    command_line,
    parse,
    render_planes,
)

import numpy as np
import torch


@dataclasses.dataclass
class SearchBenchmarkArgs:
    trees: tuple[int, ...] = (256, 1024, 4096, 16384)
    """trees at once"""
    simulations: Count = 32
    """simulations per tree"""
    width: Count = 128
    """of the small network"""
    repeats: Count = 20
    """searches to take the median of"""
    compile: bool = True
    """on a GPU: fuse the network and, as hopplus_mcts.py --compile does, parts of the search"""
    device: str = "auto"
    """auto, cpu or cuda"""
    csv: str | None = None
    """also write the figures to this CSV file"""
    profile: bool = False
    """measure the phases and the longest operations of a real search instead; flags of hopplus_mcts.py after --"""
    draw: str | None = None
    """draw a tree of a real search to this PNG file instead"""
    steps: Count = 4
    """steps that are played before the tree that is drawn"""
    checkpoint: str | None = None
    """whose networks search"""


@dataclasses.dataclass
class Args(SearchBenchmarkArgs):
    words: tuple[str, ...] = ()  # after --: flags of hopplus_mcts.py


def measure(args: Args, root: str, trees: int, device) -> float:
    """Seconds of one search of all trees"""
    use_compile = args.compile and device.type == "cuda"
    flags = hop.make_args(device=device.type, root=root, max_depth=args.simulations, compile=use_compile)
    env = hop.StagHuntEnv(device=device)  # only its generator is needed
    torch.manual_seed(1)

    def weights(inputs, outputs):
        return torch.randn(inputs, outputs, device=device) / inputs**0.5

    first, second = weights(args.width + NUM_ACTIONS, args.width), weights(args.width, args.width)
    heads, eye = weights(args.width, NUM_ACTIONS + 2), torch.eye(NUM_ACTIONS, device=device)
    start = torch.randn(trees, args.width, device=device)
    nothing, never = start[:, :0], torch.zeros(trees, dtype=torch.bool, device=device)

    @hop.compilable
    def judge(flags, board):
        out = board @ heads
        return out[:, :NUM_ACTIONS].log_softmax(1), out[:, -2]

    @hop.compilable
    def move(flags, board, action):
        x = torch.relu(torch.cat([board, eye[action]], 1) @ first)
        x = torch.relu(x @ second)
        return x, x[:, 0] * 0.01

    def evaluate(position):
        return *judge(flags, position.board), nothing.view(trees, 0, NUM_ACTIONS)

    def advance(position, joint):
        board, reward = move(flags, position.board, joint[:, 0])
        return position._replace(board=board), reward, never

    def search():
        uniform = torch.rand(args.simulations, trees, 0, device=device)
        gumbel = -(-torch.rand(trees, NUM_ACTIONS, device=device).clamp(1e-6, 1 - 1e-6).log()).log()
        position = hop.Position(start, *[nothing] * (len(hop.Position._fields) - 1))
        return hop.search(flags, 5.0, position, never, advance, evaluate, uniform, gumbel, lambda name: None)

    search()
    call, taken = hop.capture(search, env, True), []
    for _ in range(args.repeats + 5):
        timer = hop.Timer(device)
        call()
        timer.record("search")
        taken.append(timer.seconds()["time/search"])
    return float(np.median(taken[5:]))


def real_search(args: Args) -> "hop.TrainState":
    """Games and networks as hopplus_mcts.py has them, with the flags after -- and the weights of the checkpoint"""
    saved = hop.load_checkpoint(args.checkpoint) if args.checkpoint else None
    if saved:
        default = hop.Args(**{**saved["args"], "config": StagHuntConfig(**saved["args"]["config"])})
        default.device = args.device
    else:
        default = hop.make_args(**hop.game.early_flags(args.words, method="hopplus-mcts", device=args.device))
    flags = parse(hop.Args, hop.GROUPS, default, list(args.words))
    if flags.planner == "none":
        raise UserError("--planner none does not search")
    config, device = hop.validate(flags), hop.game.resolve_device(flags.device)
    flags.compile = flags.compile and device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = flags.precision != "fp32"
    seeds = list(range(flags.seed, flags.seed + flags.num_seeds))
    tables = [hop.game.seats_table(flags.seats, config.num_players)] * flags.num_seeds
    state = hop.make_train_state(flags, tables, seeds, device)
    for name, stacked in state.networks._asdict().items():
        if saved and stacked is not None:
            weights = saved["states"][0]["networks"].get(name)
            if weights is None:
                raise UserError(f"{args.checkpoint} has no network {name!r}: --planner none, or -- --search-model env")
            stacked.load_state_dict(weights)
    return state


def profile(args: Args) -> dict[str, float]:
    """Where the time of a search goes: medians over decisions of all learners, and the longest operations"""
    state = real_search(args)
    flags, device = state.args, state.env.device

    def decide():
        timer = hop.Timer(device)
        hop.rollout(flags, state.env, state.seats, state.networks, state.rollout_state, 1, True, timer)
        return timer

    decide()
    call = hop.capture(decide, state.env, flags.cudagraphs)
    taken = [call().seconds() for _ in range(args.repeats + 5)][5:]
    seconds = {name: float(np.median([row[name] for row in taken])) for name in taken[0]}
    total = sum(seconds.values())
    trees = state.seats.learner_seat.numel() * flags.num_trees
    simulations = NUM_ACTIONS if flags.planner == "one-step" else flags.num_simulations
    rate = trees * simulations / total
    print(
        f"{trees} trees, {simulations} simulations each, on {device}: {total:.4f} s, {rate / 1e6:.3f} M simulations/s"
    )
    for name, value in seconds.items():
        print(f"{name:<20} {value:.5f} s {value / total:6.1%}")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + (device.type == "cuda")]) as kernels:
        decide()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(kernels.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60))
    return seconds | {"simulations_per_second": rate}


def draw(args: Args) -> dict[str, float]:
    """The tree of the first learner on its board after --steps steps, and the board"""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).resolve().parent / "plots.mplstyle")
    state, searches, plan_actions = real_search(args), [], hop.plan_actions

    def keep(*inputs):
        searches.append((inputs[3], plan_actions(*inputs)))
        return searches[-1][1]

    hop.plan_actions = keep
    try:
        hop.rollout(state.args, state.env, state.seats, state.networks, state.rollout_state, args.steps + 1)
    finally:
        hop.plan_actions = plan_actions
    position, (*_, tree) = searches[-1]
    row = int(hop.learner_mask(state.env.config, position.board).flatten().int().argmax())
    edges, stats = (x[row * state.args.num_trees].cpu().numpy() for x in (tree.edges, tree.stats))
    found = [(int(edges[i, 3, a]), i, a) for i in range(len(edges) - 1) for a in range(NUM_ACTIONS) if edges[i, 3, a]]
    place, width = {}, itertools.count()

    def lay_out(node, depth):
        below = [lay_out(child, depth + 1) for child, parent, _ in found if parent == node]
        place[node] = (sum(below) / len(below) if below else next(width), -depth)
        return place[node][0]

    lay_out(0, 0)
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), width_ratios=[1, 3])
    axes[0].imshow(render_planes(state.env.config, position.board.flatten(0, 1)[row].cpu()))
    axes[0].set(title=f"player 0 decides, step {int(position.time.flatten()[row])}")
    axes[0].axis("off")
    for child, parent, action in found:
        (x0, y0), (x1, y1), visits = place[parent], place[child], edges[parent, 0, action]
        axes[1].plot([x0, x1], [y0, y1], color="#999999", lw=0.5 + 4 * visits / edges[0, 0].max(), alpha=0.6, zorder=1)
        label = f"{ACTION_NAMES[action]}\n{visits:.0f}: {edges[parent, 1, action] / visits:.2f}"
        axes[1].text((x0 + 2 * x1) / 3, (y0 + 2 * y1) / 3, label, fontsize=8, ha="center", va="center", zorder=3)
    colours = ["#D55E00" if stats[node, 2] else "#0072B2" for node in place]
    axes[1].scatter(*zip(*place.values(), strict=True), s=18, color=colours, zorder=2)
    axes[1].set(title="action, visits: Q; orange: the game is over for the learner", yticks=[], xticks=[])
    figure.tight_layout()
    figure.savefig(args.draw, dpi=110)
    print(f"{len(place)} nodes, {args.draw}")
    return {"nodes": float(len(place))}


def main(args: Args) -> dict[str, float]:
    hop.game.check_ranges(args)
    if min(args.trees) < 1:
        raise UserError(f"--trees must be >= 1, not {min(args.trees)}")
    if args.profile or args.draw:
        return profile(args) if args.profile else draw(args)
    device, rates = hop.game.resolve_device(args.device), {}
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {args.simulations} simulations, medians of {args.repeats}")
    for root, trees in itertools.product(("puct", "gumbel"), args.trees):
        seconds = measure(args, root, trees, device)
        rates[f"{root}/{trees}"] = rate = trees * args.simulations / seconds
        print(f"{root:<7} {trees:>6} trees {1000 * seconds:9.3f} ms {rate / 1e6:9.3f} M simulations/s", flush=True)
    if args.csv:
        rows = [[*key.split("/"), rate, name, torch.__version__] for key, rate in rates.items()]
        with open(args.csv, "w", newline="") as file:
            csv.writer(file).writerows([["root", "trees", "simulations_per_second", "device", "torch"], *rows])
    return rates


def parse_args(words: list[str]) -> Args:
    at = words.index("--") if "--" in words else len(words)
    own = parse(SearchBenchmarkArgs, {"search": SearchBenchmarkArgs}, SearchBenchmarkArgs(), words[:at])
    return Args(**vars(own), words=tuple(words[at + 1 :]))


if __name__ == "__main__":
    command_line(parse_args, main)
