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
from stag_hunt_env import ACTION_NAMES, NUM_ACTIONS, Count, UserError, command_line, parse, planes, render_planes

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
    hop.fuse(use_compile)
    torch.manual_seed(1)

    def weights(inputs, outputs):
        return torch.randn(inputs, outputs, device=device) / inputs**0.5

    first = weights(args.width + NUM_ACTIONS, args.width)
    second = weights(args.width, args.width)
    heads = weights(args.width, NUM_ACTIONS + 2)
    eye = torch.eye(NUM_ACTIONS, device=device)
    start = torch.randn(trees, args.width, device=device)
    nothing = start[:, :0]
    never = torch.zeros(trees, dtype=torch.bool, device=device)

    def judge(board):
        out = board @ heads
        return out[:, :NUM_ACTIONS].log_softmax(1), out[:, -2]

    def move(board, action):
        x = torch.relu(torch.cat([board, eye[action]], 1) @ first)
        x = torch.relu(x @ second)
        return x, x[:, 0] * 0.01

    if use_compile:
        judge = torch.compile(judge, dynamic=False)
        move = torch.compile(move, dynamic=False)

    def evaluate(position):
        log_policy, value = judge(position.board)
        return log_policy, value, nothing.view(trees, 0, NUM_ACTIONS)

    def advance(position, joint):
        board, reward = move(position.board, joint[:, 0])
        return position._replace(board=board), reward, never

    def search():
        uniform = torch.rand(args.simulations, trees, 0, device=device)
        gumbel = torch.rand(trees, NUM_ACTIONS, device=device).clamp(1e-6, 1 - 1e-6)
        gumbel = -(-gumbel.log()).log()
        position = hop.Position(board=start, time=nothing, first_hunt=nothing, last_joint=nothing, history=nothing)
        return hop.search(flags, 5.0, position, never, advance, evaluate, uniform, gumbel, lambda name: None)

    search()
    call = hop.capture(search, env, True)
    seconds = []
    for _ in range(args.repeats + 5):
        timer = hop.Timer(device)
        call()
        timer.record("search")
        seconds.append(timer.seconds()["time/search"])
    return float(np.median(seconds[5:]))


def real_search(args: Args) -> "hop.TrainState":
    """Games and networks as hopplus_mcts.py has them, with the flags after -- and the weights of the checkpoint"""
    saved = None
    if args.checkpoint:
        saved = hop.game.load_checkpoint(args.checkpoint, hop.FORMAT, hop.KEYS)
        default = hop.load_args(args.checkpoint, saved["args"], device=args.device)
    else:
        default = hop.make_args(**hop.game.early_flags(args.words, method="hopplus-mcts", device=args.device))
    flags = parse(hop.Args, hop.GROUPS, default, list(args.words))
    if flags.planner == "none":
        raise UserError("--planner none does not search")
    config = hop.validate(flags)
    device = hop.game.resolve_device(flags.device)
    flags.compile = flags.compile and device.type == "cuda"
    hop.fuse(flags.compile)
    torch.backends.cuda.matmul.allow_tf32 = flags.precision != "fp32"
    seeds = list(range(flags.seed, flags.seed + flags.num_seeds))
    tables = [hop.game.seats_table(flags.seats, config.num_players)] * flags.num_seeds
    state = hop.make_train_state(flags, tables, seeds, device)
    if saved:
        for name, network in state.networks.present().items():
            weights = saved["states"][0]["networks"].get(name)
            if weights is None:
                raise UserError(f"{args.checkpoint} has no network {name!r}: --planner none, or -- --search-model env")
            network.load_state_dict(weights)
    return state


def profile(args: Args) -> dict[str, float]:
    """Where the time of a search goes: medians over decisions of all learners, and the longest operations"""
    state = real_search(args)
    flags = state.args
    env = state.games.env
    device = env.device

    def decide():
        timer = hop.Timer(device)
        hop.rollout(flags, state.games, state.networks, 1, timer=timer)
        return timer

    decide()
    call = hop.capture(decide, env, flags.cudagraphs)
    rows = [call().seconds() for _ in range(args.repeats + 5)][5:]
    seconds = {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
    total = sum(seconds.values())
    trees = state.games.seats.learner_seat.numel() * flags.num_trees
    simulations = NUM_ACTIONS if flags.planner == "one-step" else flags.num_simulations
    rate = trees * simulations / total
    speed = f"{total:.4f} s, {rate / 1e6:.3f} M simulations/s"
    print(f"{trees} trees, {simulations} simulations each, on {device}: {speed}")
    for name, value in seconds.items():
        print(f"{name:<20} {value:.5f} s {value / total:6.1%}")
    activities = [torch.profiler.ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with torch.profiler.profile(activities=activities) as kernels:
        decide()
    print(kernels.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60))
    return seconds | {"simulations_per_second": rate}


@torch.no_grad()
def search_now(state) -> tuple["hop.Position", torch.Tensor, "hop.Tree"]:
    """As rollout searches on the boards of this moment -> Position [M, E, ...], walls [M, E, _], the trees"""
    args = state.args
    games = state.games
    env = games.env
    seats = games.seats
    position = hop.Position(
        board=seats.to_learners(env.cells(env.state)),
        time=seats.per_learner(env.state.time),
        first_hunt=seats.per_learner(env.state.first_hunt),
        last_joint=games.last_joint,
        history=games.history,
    )
    walls = seats.per_learner(env.state.walls[:, : env.config.num_wall_cells])
    clock = seats.per_learner(env.clock(env.state))
    views = hop.entity_views(env, position.board, walls)
    oracle_id = hop.told_subgoals(args, games)
    infer = hop.infer_opponents
    belief = infer(args, env, state.networks, views, clock, games.history, oracle_id)
    situation = position, walls, oracle_id, belief, seats.learner_seat
    _, tree = hop.plan_actions(args, env, state.networks, infer, *situation, lambda name: None)
    return position, walls, tree


def draw(args: Args) -> dict[str, float]:
    """The tree of the first learner on its board after --steps steps, and the board"""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).resolve().parent / "plots.mplstyle")
    state = real_search(args)
    config = state.args.config
    hop.rollout(state.args, state.games, state.networks, args.steps)
    position, walls, trees = search_now(state)
    row = int(hop.learner_mask(config, position.board).flatten().int().argmax())
    number = row * state.args.num_trees
    visits, returns, child, ended = (
        x[number].cpu().numpy() for x in (trees.visits, trees.returns, trees.child, trees.ended)
    )
    edges = []  # parent, action, child
    for parent, action in itertools.product(range(len(child) - 1), range(NUM_ACTIONS)):
        if child[parent, action]:
            edges.append((parent, action, int(child[parent, action])))
    place = {}
    width = itertools.count()

    def lay_out(node, depth):
        below = [lay_out(child, depth + 1) for parent, _, child in edges if parent == node]
        column = sum(below) / len(below) if below else next(width)
        place[node] = (column, -depth)
        return column

    lay_out(0, 0)
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), width_ratios=[1, 3])
    board = planes(config, position.board.flatten(0, 1)[row], walls.flatten(0, 1)[row])
    axes[0].imshow(render_planes(config, board.cpu()))
    axes[0].set(title=f"player 0 decides, step {int(position.time.flatten()[row])}")
    axes[0].axis("off")
    for parent, action, node in edges:
        (x0, y0), (x1, y1) = place[parent], place[node]
        count = visits[parent, action]
        line_width = 0.5 + 4 * count / visits[0].max()
        axes[1].plot([x0, x1], [y0, y1], color="#999999", lw=line_width, alpha=0.6, zorder=1)
        label = f"{ACTION_NAMES[action]}\n{count:.0f}: {returns[parent, action] / count:.2f}"
        axes[1].text((x0 + 2 * x1) / 3, (y0 + 2 * y1) / 3, label, fontsize=8, ha="center", va="center", zorder=3)
    colours = ["#D55E00" if ended[node] else "#0072B2" for node in place]
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
    device = hop.game.resolve_device(args.device)
    rates = {}
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {args.simulations} simulations, medians of {args.repeats}")
    for root, trees in itertools.product(("puct", "gumbel"), args.trees):
        seconds = measure(args, root, trees, device)
        rate = trees * args.simulations / seconds
        rates[f"{root}/{trees}"] = rate
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
