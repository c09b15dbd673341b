"""Pretrains the subgoal VAE, the subgoal inference and the model of the others' actions (MOA) on
games of rule-based players, and measures them like a classifier.

    python pretrain_vae.py                                      # 4x4, continuous subgoals
    python pretrain_vae.py --data games.npz                     # recorded games: see load_data
    python pretrain_vae.py --resume runs/RUN                    # goes on where the run stopped
    python hopplus_ppo.py --vae-checkpoint runs/RUN/checkpoint.pt

A sample is one step of one player j on the board: its view of the game so far -> its action. `moa`
reads a subgoal inferred from the whole game so far, `moa_prior` one from the present state alone.

Axes: S seeds, one model each, G games, R trajectories, each one player's view of a game, T steps, n
samples, N players, P prey, D numbers of a subgoal. A board is uint8 [X]: the cell of each player
and prey (H * W: gone), then the walls (or one 0). Players are in ego order: who looks comes first.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Literal

import stag_hunt_env as game
from stag_hunt_env import ACTION_NAMES, NUM_ACTIONS, STAY, StagHuntConfig, StagHuntEnv

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "pretrain_vae 12"  # of a checkpoint
FIGURES = ("top1", "top3", "nll", "macro_f1", "recall_without_stay")
ACTION_FIGURES = ("count", "share", "precision", "recall", "f1")  # of each action
CEILINGS = ("moa/bayes", "moa/ceiling")  # who infers j's kind by Bayes' rule, who knows it
MUST_MATCH = ("goal_kind", "goal_dim", "subgoal_hidden")  # where the networks are loaded
MUST_MATCH += ("height", "width", "num_players", "num_stags", "num_hares", "max_wall_pieces")
MUST_MATCH += ("final_time",)

Tensors = dict[str, Tensor]


# ---- Arguments
@dataclasses.dataclass
class Args:
    exp_name: str = Path(__file__).stem  # first part of the run's name
    seed: int = 1  # of the first experiment; the others count up
    num_seeds: int = 1  # S, experiments side by side, each with its own games
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    run_dir: str = "runs"  # where the runs' folders are made
    resume: str | None = None  # go on with the run of this folder
    # Data
    population: str = ",".join(game.POPULATION)  # who plays: each seat draws one of these
    data: str | None = None  # learn from the games in this .npz instead
    num_samples: int = 100_000  # samples to learn from
    held_out_games: int = 1000  # further games to measure on
    augment: bool = True  # show games in random ones of the board's symmetries
    # Models
    loss: Literal["recon", "moa", "both"] = "both"  # of state, of action: what shapes subgoals
    goal_kind: Literal["continuous", "discrete"] = "continuous"  # Gaussian, or Gumbel-softmax
    goal_dim: int = 16  # D, the size of a subgoal (discrete: the number of categories)
    subgoal_hidden: int = 64  # width of the subgoal networks and the MOA
    kl_coef: float = 1e-3  # weight of the KL terms
    epochs: int = 15  # passes over the samples
    batch_size: int = 128  # trajectories per update and seed
    learning_rate: float = 3e-3  # at the start; falls to 0 along a cosine

    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)

    def __post_init__(self):
        self.distribution_size = self.goal_dim * (2 if self.goal_kind == "continuous" else 1)


def parse_args() -> Args:
    """The command line's flags, checked"""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume")
    first.add_argument("--epochs", type=int, default=argparse.SUPPRESS)
    given, others = first.parse_known_args()
    if given.resume is not None:
        refuse(len(others) > 0, f"beside --resume only --epochs, not {' '.join(others)}")
        saved = load_checkpoint(given.resume, FORMAT)["args"]
        saved |= {"config": StagHuntConfig(**saved["config"]), **vars(given)}
        args = Args(**saved)
    else:
        args = tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))
    check(args)
    return args


def check(args: Args) -> None:
    """Refuses wrong flags before anything is written"""
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, int | float):
            least = 1 if type(value) is int and name != "seed" else 0
            refuse(not value >= least, f"{name} must be {least} or more, not {value}")
    game.player_names(args.population)
    refuse(args.device == "cuda" and not torch.cuda.is_available(), "--device cuda: no GPU here")
    refuse(args.config.num_cells > 255, "a board has up to 255 cells")
    refuse(args.goal_kind == "discrete" and args.goal_dim < 2, "discrete needs --goal-dim 2")


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        tqdm.write(f"error: {message}", file=sys.stderr)  # not into the progress bar
        sys.exit(1)


# ---- Networks. Each is M side by side, one per seed: rows [M, n, ...], parameters [M, ...]. A row
# never looks at another, so Stacked may split a batch.
class Linear(nn.Module):
    """[M, n, inputs] -> [M, n, outputs]"""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3 / inputs)
        self.weight = nn.Parameter(torch.empty(1, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(1, outputs))

    def forward(self, x):
        return torch.bmm(x, tile_weights(self.weight, x)) + tile_weights(self.bias, x)[:, None]


def tile_weights(parameter, x):
    """[M, ...] in the dtype of x, repeated for each part of a batch that Stacked has split"""
    refuse(not x.is_floating_point(), "a layer reads floats: call .float() first")
    parts = len(x) // len(parameter)
    parameter = parameter.to(x.dtype)
    return parameter if parts == 1 else parameter.repeat_interleave(parts, 0)


def mlp(*sizes: int, gain: float = 1.0) -> nn.Sequential:
    """Layers with ReLU between them; gain is the last one's"""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [Linear(inputs, outputs, math.sqrt(2)), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, Linear(sizes[-2], sizes[-1], gain))


class Stacked:
    """M networks of one kind as one: inputs [M, n, ...] -> outputs [M, n, ...], in float32"""

    def __init__(self, kind, args, seeds, device, dtype=torch.float32, train_dtype=torch.float32):
        networks = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                networks.append(kind(args))
        self.network = networks[0]
        self.params = dict(self.network.named_parameters())
        for name, x in self.network.state_dict().items():
            wrong = name not in self.params or x.shape[:1] != (1,)
            refuse(wrong, f"{kind.__name__}.{name} {list(x.shape)} is no parameter [1, ...]: see Linear")
        for same in zip(*(network.parameters() for network in networks), strict=True):
            same[0].data = torch.cat([p.data for p in same])  # [1, ...] each
        self.network.to(device)
        self.dtype = dtype
        self.train_dtype = train_dtype  # where a gradient is asked for

    def __call__(self, *inputs: Tensor, method: str = "forward"):
        learning = torch.is_grad_enabled()
        dtype = self.train_dtype if learning else self.dtype
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        m, n = inputs[0].shape[:2]
        if learning and inputs[0].is_cuda:
            # As one long sum, a weight's gradient leaves most of a GPU idle.
            parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1)
            inputs = [x.reshape(m * parts, n // parts, *x.shape[2:]) for x in inputs]
        outputs = getattr(self.network, method)(*inputs)
        outputs = tree_map(lambda x: x.reshape(m, n, *x.shape[2:]), outputs)
        return tree_map(lambda x: x.float() if x.is_floating_point() else x, outputs)

    def state_dict(self) -> Tensors:
        return {name: p.detach() for name, p in self.params.items()}


class BoardEncoder(nn.Module):
    """Each player and prey is looked up by its kind and its cell relative to the observer, or by
    its number if it is gone; what is found adds up"""

    def __init__(self, config: StagHuntConfig, hidden: int):
        super().__init__()
        players, cells = config.num_players, config.num_cells
        kinds = [*range(players), *[players] * config.num_stags, *[players + 1] * config.num_hares]
        wide = 2 * config.width - 1
        spots = (2 * config.height - 1) * wide  # cells relative to the observer
        row, column = np.divmod(np.arange(cells), config.width)
        down = row - row[:, None] + config.height - 1
        right = column - column[:, None] + config.width - 1
        own = spots * (players + 2)  # the observer itself is looked up by its cell on the board
        lookup = np.empty((len(kinds), cells + 1, cells + 1), int)  # [entity, own cell, its cell]
        for entity, kind in enumerate(kinds):
            lookup[entity] = own + cells + entity  # not there
            lookup[entity, :cells, :cells] = spots * kind + down * wide + right
        lookup[:, cells] = lookup[:, 0]  # who has left sees the board from its first cell
        lookup[0, :cells] = own + np.arange(cells)[:, None]
        rows = own + cells + len(kinds)
        rows += -rows % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("entity", torch.arange(len(kinds)), persistent=False)
        self.table = nn.Parameter(0.1 * torch.randn(1, rows, 2 * hidden))
        self.walls = Linear(cells, 2 * hidden) if config.max_wall_pieces else None
        self.mix = mlp(2 * hidden, hidden, gain=math.sqrt(2))

    def forward(self, board):
        """float [M, n, X] -> [M, n, hidden]"""
        cells = board[..., : len(self.entity)].long()
        row = self.lookup[self.entity, cells[..., :1], cells]
        table = tile_weights(self.table, board)
        if row.is_cuda:  # as a product: the gradient of a lookup is slow on a GPU
            one_hot = table.new_zeros(*row.shape[:2], table.shape[1]).scatter_(2, row, 1.0)
            x = torch.bmm(one_hot, table)
        else:
            row = row + table.shape[1] * torch.arange(len(table))[:, None, None]  # flat tables
            x = F.embedding_bag(row.flatten(0, 1), table.flatten(0, 1), mode="sum")
            x = x.unflatten(0, row.shape[:2])
        if self.walls is not None:
            x = x + self.walls(board[..., len(self.entity) :])
        return self.mix(x.relu()).relu_()


class SubgoalPrior(nn.Module):
    """f_psi, a VAE: state -> distribution over subgoals; decoder: subgoal -> state"""

    def __init__(self, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(args.config, hidden)
        self.head = Linear(hidden, args.distribution_size)
        self.decoder = mlp(args.goal_dim, hidden, math.prod(args.config.observation_shape))

    def forward(self, board):
        return self.head(self.encoder(board))


class SubgoalInference(nn.Module):
    """q_phi, a CVAE after OMG: history up to t - 1 and state s_t -> distribution over subgoals;
    decoder: subgoal and history -> state. A history is two sums of events, of this game and of
    earlier ones; entry 0 of each counts its events."""

    def __init__(self, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        state_size = math.prod(args.config.observation_shape)
        self.encoder = BoardEncoder(args.config, hidden)
        self.events = mlp(hidden + NUM_ACTIONS * args.config.num_players, hidden, hidden)
        self.head = mlp(3 * hidden, hidden, args.distribution_size)
        self.decoder = mlp(args.goal_dim + 2 * hidden, hidden, state_size)

    def event(self, features, joint):
        """features [M, n, hidden], joint action [M, n, N] -> what the step adds"""
        acts = F.one_hot(joint, NUM_ACTIONS).flatten(2)
        event = self.events(torch.cat([features, acts], 2))
        return F.pad(event[..., 1:], (1, 0), value=1.0)

    def forward(self, features, history):
        return self.head(torch.cat([features, scale_history(history)], 2))


def scale_history(history):
    """[M, n, 2 * hidden]: evidence grows with the number of events, its noise with the root"""
    sums = history.unflatten(2, (2, -1))
    return (sums / (1 + sums[..., :1]).sqrt()).flatten(2)


class ActionModel(nn.Module):
    """MOA, pi_omega: state seen by j, clock, subgoal of j -> log-probabilities of j's action. Its
    clock is a thermometer: that somebody begins late is easy to learn"""

    def __init__(self, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        final_time = args.config.final_time
        size = final_time + -final_time % 8  # as in BoardEncoder
        self.register_buffer("ticks", torch.arange(0.5, size) / final_time, persistent=False)
        self.encoder = BoardEncoder(args.config, hidden)
        self.head = mlp(hidden + size + args.goal_dim, hidden, hidden, NUM_ACTIONS, gain=0.01)

    def forward(self, board, clock, goal, legal):
        clock = (clock[..., None] > self.ticks).to(goal.dtype)
        logits = self.head(torch.cat([self.encoder(board), clock, goal], 2))
        return logits.float().masked_fill(~legal, -1e9).log_softmax(2)


# ---- Subgoals: distributions [..., parameters] over D numbers or categories
def goal_noise(args: Args, distribution):
    """[M, n, D] for distribution [M, n, _]: standard normal, or Gumbel for categories"""
    shape = *distribution.shape[:2], args.goal_dim
    if args.goal_kind == "continuous":
        return torch.randn(shape, device=distribution.device)
    uniform = torch.rand(shape, device=distribution.device).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(uniform))


def sample_goal(args: Args, distribution, noise):
    """Reparameterised, or straight-through Gumbel-softmax of temperature 0.5"""
    if args.goal_kind == "continuous":
        mean, log_var = distribution.chunk(2, -1)
        return mean + noise * (0.5 * log_var.clamp(-8, 4)).exp()
    soft = ((distribution + noise) / 0.5).softmax(-1)
    return F.one_hot(soft.argmax(-1), soft.shape[-1]) + soft - soft.detach()


def goal_kl(args: Args, q, p):
    """KL(q || p) [...]"""
    if args.goal_kind == "discrete":
        return (q.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1))).sum(-1)
    q_mean, q_log_var = q.chunk(2, -1)
    p_mean, p_log_var = p.chunk(2, -1)
    q_log_var = q_log_var.clamp(-8, 4)
    p_log_var = p_log_var.clamp(-8, 4)
    ratio = (q_log_var - p_log_var).exp() + (q_mean - p_mean).square() / p_log_var.exp()
    return 0.5 * (ratio - 1 - q_log_var + p_log_var).sum(-1)


# ---- Data
def play_games(args: Args, env: StagHuntEnv) -> Tensors:
    """One game in each place, seen by each of its players: [G, T, N, ...]"""
    config = env.config
    players = config.num_players
    seats = game.Seats(env, [["mixed"] * players], population=args.population, redraw="never")
    kinds = len(seats.population)
    log_belief = torch.zeros(env.num_envs, players, kinds, device=env.device).log_softmax(2)
    state = env.initial_state()
    walls = state.walls[:, None, : config.num_wall_cells].expand(-1, players, -1)
    steps = []
    for _ in range(config.final_time):
        probs = seats.action_probs(state)
        actions = game.sample(probs)
        next_state, _, acted, done = env.transition(state, actions)
        step = {
            "board": torch.cat([env.cells(state), walls], 2),
            "joint": env.seats_to_ego(torch.where(acted, actions, STAY)).byte(),
            "legal": env.legal_actions(state),
            "acted": acted,  # on the board before the step, and the game not over
            "moa/bayes": (log_belief.exp()[..., None] * seats.table).sum(2),
            "moa/ceiling": probs,
        }
        steps.append(step)
        action = actions[..., None, None].expand(-1, -1, kinds, 1)
        likelihood = seats.table.gather(3, action).squeeze(3).clamp(min=1e-9)
        log_belief = (log_belief + likelihood.log() * acted[..., None]).log_softmax(2)
        seats.update(done)
        state = next_state
    return tree_map(lambda *x: torch.stack(x, 1), *steps)


def collect(args: Args, samples: int, seed: int, device) -> tuple[Tensors, Tensors]:
    """-> games to learn from, with so many samples or more; --held-out-games others"""
    torch.manual_seed(seed)
    count = args.held_out_games
    if args.data is not None:
        games = load_data(args, device)
        held_out = {name: x[:count] for name, x in games.items()}
        return {name: x[count:] for name, x in games.items()}, held_out
    env = StagHuntEnv(args.config, 256, device, seed)
    games = []
    while sum(int(each["acted"].sum()) for each in games) < samples:
        games.append(play_games(args, env))
    held_out = [play_games(args, env) for _ in range(math.ceil(count / env.num_envs))]
    held_out = tree_map(lambda *x: torch.cat(x)[:count], *held_out)
    return tree_map(lambda *x: torch.cat(x), *games), held_out


def load_data(args: Args, device) -> Tensors:
    """Recorded games: an .npz with the arrays of `play_games`, and `setting`, such as 4x4_4h1s"""
    config = args.config
    path = f"--data {args.data}"
    try:
        with np.load(args.data) as file:
            arrays = dict(file)
    except Exception:  # whatever numpy makes of a file
        refuse(True, f"{path}: no such file, or no .npz of arrays")
    setting = arrays.get("setting", "an unknown setting")
    refuse(setting != config.setting, f"{path}: games of {setting}, not of {config.setting}")
    games = {}
    for name, like in play_games(args, StagHuntEnv(config)).items():  # what they look like
        if name in arrays or name not in CEILINGS:
            shape = np.shape(arrays.get(name))
            wanted = (*np.shape(arrays.get("board"))[:1], *like.shape[1:])
            refuse(shape != wanted, f"{path}: {name} is {shape or 'missing'}, not {wanted}")
            games[name] = torch.from_numpy(arrays[name]).to(like)
    joint = games["joint"].long()
    beyond = games["board"][..., : -config.num_wall_cells] > config.num_cells
    wrong = beyond.any() or (joint >= NUM_ACTIONS).any()
    wrong = wrong or not games["legal"].gather(3, joint[..., :1]).all()
    refuse(bool(wrong), f"{path}: a cell beyond the board, or an action that is not legal")
    refuse(len(joint) <= args.held_out_games, f"{path}: {len(joint)} games, see --held-out-games")
    return {name: x.to(device) for name, x in games.items()}


def trajectories(games: list[Tensors], samples: float = math.inf) -> Tensors:
    """Each player's view of each game, up to so many samples: of all seeds [S, R, T, ...], filled
    up with steps at which nobody acted"""
    parts = []
    for each in games:
        part = {name: x.transpose(1, 2).flatten(0, 1) for name, x in each.items()}
        rows = int((part["acted"].sum(1).cumsum(0) < samples).sum()) + 1
        parts.append({name: x[:rows] for name, x in part.items()})
    return tree_map(lambda *x: pad_sequence(x, batch_first=True), *parts)


def symmetries(config: StagHuntConfig, device) -> tuple[Tensor, Tensor]:
    """8 of a square board, else 4: where each cell goes [8, H*W + 1], what an action becomes [8, 7]"""
    moves = [1, 7, 3, 5]  # up, down, left, right of the middle of a 3x3 board
    turns = range(4) if config.height == config.width else (0, 2)
    cells, actions = [], []
    for flip, quarters in itertools.product((1, -1), turns):
        around = np.arange(9).reshape(3, 3)
        board = np.arange(config.num_cells).reshape(config.height, config.width)
        goes, beside = (np.rot90(x[:, ::flip], quarters).argsort(None) for x in (board, around))
        cells.append([*goes.tolist(), config.num_cells])
        actions.append([*(moves.index(beside[move]) for move in moves), *range(STAY, NUM_ACTIONS)])
    return torch.tensor(cells, device=device), torch.tensor(actions, device=device)


def turn(config: StagHuntConfig, games: Tensors, tables: tuple, which: Tensor) -> Tensors:
    """Each trajectory [S, B, T, ...] in one of the `symmetries`, number which [S, B]"""
    sizes = [config.num_players + config.num_prey, config.num_wall_cells]
    entities, walls = games["board"].long().split(sizes, 3)
    joint, legal = games["joint"].long(), games["legal"]
    cells, actions = (x[which[..., None].expand(joint.shape[:3])] for x in tables)  # [S, B, T, _]
    if config.max_wall_pieces:
        walls = torch.zeros_like(walls).scatter(3, cells[..., :-1], walls)
    return games | {
        "board": torch.cat([cells.gather(3, entities), walls], 3),
        "joint": actions.gather(3, joint),
        "legal": torch.zeros_like(legal).scatter(3, actions, legal),
    }


def pack(x, acted):
    """[S, B, T, ...] -> [S, n, ...]: steps at which j acted, zeros where a seed has fewer"""
    parts = [of_seed[mask] for of_seed, mask in zip(x, acted, strict=True)]
    return pad_sequence(parts, batch_first=True)


def make_batch(config: StagHuntConfig, games: Tensors) -> Tensors:
    """Trajectories [S, B, T, ...] -> their samples [S, n, ...]"""
    acted = games["acted"]
    clock = torch.arange(acted.shape[2], device=acted.device) / config.final_time
    last = acted.sum(2, keepdim=True).cumsum(1) - 1
    batch = games | {
        "board": games["board"].float(),
        "joint": games["joint"].long(),
        "clock": clock.expand(acted.shape),
        "last": last.expand(acted.shape),  # which sample is the trajectory's last
        "weight": acted.float(),
    }
    return {name: pack(x, acted) for name, x in batch.items()} | {"acted": acted}


# ---- Losses
def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    total = (x * weight).flatten(1).sum(1)
    return total / weight.flatten(1).sum(1).clamp(min=1e-6)


def infer_subgoals(networks: dict[str, Stacked], batch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """-> distributions of f_psi and q_phi [S, n, _], histories before samples [S, n, 2 * hidden]"""
    inference = networks["inference"]
    acted = batch["acted"]
    prior = networks["prior"](batch["board"])
    features = inference(batch["board"], method="encoder")
    event = inference(features, batch["joint"], method="event")
    events = event.new_zeros(*acted.shape, event.shape[2])
    events[acted] = event[batch["weight"] > 0]  # as trajectories again [S, B, T, hidden]
    earlier = torch.ones(acted.shape[2], acted.shape[2], device=event.device).tril(-1)  # [t, event]
    history = pack(earlier @ events, acted)
    history = F.pad(history, (0, history.shape[2]))  # no earlier games
    return prior, inference(features, history), history


def action_log_probs(args: Args, moa: Stacked, batch: Tensors, distribution, goals):
    """[S, n, 7], averaged over the subgoals drawn [S, n, k, D], or exactly over all categories:
    from straight-through draws alone the encoder would learn to use one category for everything"""
    log_weights = goals.new_full(goals.shape[:3], -math.log(goals.shape[2]))
    if args.goal_kind == "discrete":
        goals = torch.eye(args.goal_dim, device=goals.device).expand(*distribution.shape, -1)
        log_weights = distribution.log_softmax(2)
    k = goals.shape[2]
    board, clock, legal = (batch[name].repeat_interleave(k, 1) for name in ("board", "clock", "legal"))
    log_probs = moa(board, clock, goals.flatten(1, 2), legal).unflatten(1, (-1, k))
    return (log_probs + log_weights[..., None]).logsumexp(2)


def action_loss(args: Args, moa: Stacked, batch: Tensors, distribution, goal):
    """[S]: MOA's cross-entropy given j's subgoal"""
    if args.loss == "recon":  # MOA learns too, but on subgoals that it cannot move
        distribution = distribution.detach()
        goal = goal.detach()
    log_probs = action_log_probs(args, moa, batch, distribution, goal[:, :, None])
    nll = -log_probs.gather(2, batch["joint"][..., :1])[..., 0]
    return masked_mean(nll, batch["weight"])


def reconstruction_loss(config: StagHuntConfig, batch: Tensors, logits):
    """[S]: of the planes that j saw, logits [S, n, C*H*W]"""
    sizes = [config.num_players + config.num_prey, config.num_wall_cells]
    planes = game.planes(config, *batch["board"].split(sizes, 2)).flatten(2).float()
    error = F.binary_cross_entropy_with_logits(logits, planes, reduction="none")
    return masked_mean(error.mean(2), batch["weight"])


def vae_losses(args: Args, networks: dict[str, Stacked], batch: Tensors) -> Tensors:
    """[S] each: `vae` is the side that sees the present state only, `cvae` the one with history"""
    weight = batch["weight"]
    prior, posterior, history = infer_subgoals(networks, batch)
    # The subgoal in hindsight: f_psi's of the last state before j left. It does not move f_psi.
    hindsight = prior.detach().gather(1, batch["last"][..., None].expand_as(prior))
    noise, posterior_noise = goal_noise(args, torch.cat([prior, posterior])).chunk(2)
    losses = {}

    goal = sample_goal(args, prior, noise)
    logits = networks["prior"](goal, method="decoder")
    losses["recon_vae"] = reconstruction_loss(args.config, batch, logits)
    losses["kl_vae"] = masked_mean(goal_kl(args, prior, torch.zeros_like(prior)), weight)
    losses["moa_vae"] = action_loss(args, networks["moa_prior"], batch, prior, goal)

    goal = sample_goal(args, posterior, posterior_noise)
    logits = networks["inference"](torch.cat([goal, scale_history(history)], 2), method="decoder")
    losses["recon_cvae"] = reconstruction_loss(args.config, batch, logits)
    losses["kl_cvae"] = masked_mean(goal_kl(args, posterior, hindsight), weight)
    losses["moa_cvae"] = action_loss(args, networks["moa"], batch, posterior, goal)

    coefs = {"recon": 0.0 if args.loss == "moa" else 1.0, "kl": args.kl_coef, "moa": 1.0}
    losses["total"] = sum(coefs[name.split("_")[0]] * x for name, x in losses.items())
    return losses


# ---- Measuring
@torch.no_grad()
def measure(args: Args, networks: dict[str, Stacked], data: Tensors, draws: int = 8) -> list[dict]:
    """Of each seed {predictor: figures}; `moa_prior` knows the present state, `moa` the past too"""
    torch.manual_seed(0)
    parts = []
    for first in range(0, data["acted"].shape[1], 512):
        games = {name: x[:, first : first + 512] for name, x in data.items()}
        batch = make_batch(args.config, games)
        prior, posterior, _ = infer_subgoals(networks, batch)
        part = {"action": batch["joint"][..., 0], "mask": batch["weight"] > 0}
        for name, distribution in {"moa_prior": prior, "moa": posterior}.items():
            repeated = distribution.repeat_interleave(draws, 1)
            goals = sample_goal(args, repeated, goal_noise(args, repeated)).unflatten(1, (-1, draws))
            part[name] = action_log_probs(args, networks[name], batch, distribution, goals).exp()
        part |= {name: batch[name] for name in CEILINGS if name in batch}
        parts.append(part)
    samples = tree_map(lambda *x: torch.cat(x, 1).cpu().numpy(), *parts)  # [S, n, ...]
    action = samples.pop("action")
    tables = []
    for seed, mask in enumerate(samples.pop("mask")):
        probs = {name: x[seed, mask] for name, x in samples.items()}
        tables.append({name: classify(x, action[seed, mask]) for name, x in probs.items()})
    return tables


def classify(probs: np.ndarray, action: np.ndarray) -> dict[str, float | np.ndarray]:
    """probs [n, 7], true actions [n] -> FIGURES, ACTION_FIGURES [7], confusion [true, predicted];
    the last two split the prediction where actions are equally likely, within 0.1"""
    likely = probs >= probs.max(1, keepdims=True) - 0.1
    confusion = np.zeros((NUM_ACTIONS, NUM_ACTIONS))
    np.add.at(confusion, action, likely / likely.sum(1, keepdims=True))
    hits = np.diag(confusion)
    count = confusion.sum(1)
    guessed = confusion.sum(0)
    with np.errstate(invalid="ignore"):  # actions that nobody took, or predicted
        precision = hits / guessed
        recall = hits / count
        f1 = np.nan_to_num(2 * hits / (count + guessed))
    rank = (np.argsort(-probs, 1, kind="stable") == action[:, None]).argmax(1)
    likelihood = np.take_along_axis(probs, action[:, None], 1)
    return {
        "top1": (rank == 0).mean(),
        "top3": (rank < 3).mean(),
        "nll": -np.log(np.maximum(likelihood, 1e-12)).mean(),
        "macro_f1": f1[count > 0].mean(),
        "recall_without_stay": np.nanmean(np.delete(recall, STAY)),
        "count": np.bincount(action, minlength=NUM_ACTIONS),
        "share": count / count.sum(),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "confusion": confusion,
    }


# ---- Tables and pictures
def write_table(folder: Path, name: str, table: dict[str, dict]) -> None:
    """NAME.npz has all figures and confusion matrices, NAME.csv the figures of each action"""
    arrays = {}
    lines = [("predictor", "action", *ACTION_FIGURES)]
    for predictor, figures in table.items():
        arrays |= {f"{predictor}/{figure}": x for figure, x in figures.items()}
        for number, action in enumerate(ACTION_NAMES):
            lines.append((predictor, action, *(figures[name][number] for name in ACTION_FIGURES)))
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays)
    np.savetxt(folder / f"{name}.csv", lines, "%s", ",")


def draw(table: dict[str, dict]) -> Figure:
    """Confusion matrices, whose rows sum to 1; how often actions are taken, and then predicted"""
    figure = Figure((22, 10), layout="tight")
    axes = figure.subplot_mosaic([[*table], ["recall"] * len(table)])
    axes["recall"].bar(ACTION_NAMES, table["moa"]["share"], color="lightgrey", label="share")
    for name, figures in table.items():
        matrix = figures["confusion"] / np.maximum(figures["count"], 1)[:, None]
        axes[name].imshow(matrix, cmap="Blues", alpha=0.6, vmin=0, vmax=1)
        for (true, predicted), value in np.ndenumerate(matrix):
            axes[name].text(predicted, true, f"{value:.2f}", ha="center", va="center")
        axes[name].set_xticks(range(NUM_ACTIONS), ACTION_NAMES, rotation=40)
        axes[name].set_yticks(range(NUM_ACTIONS), ACTION_NAMES)
        axes[name].set(title=name, xlabel="predicted", ylabel="true")
        axes["recall"].plot(ACTION_NAMES, figures["recall"], "o", label=f"recall of {name}")
    axes["recall"].legend()
    return figure


# ---- Training
def optimizer_step(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    """Down the sum of losses [S]; each model's gradient is clipped to a norm of 1"""
    optimizer.zero_grad()
    loss.sum().backward()
    params = optimizer.param_groups[0]["params"]
    norms = torch.cat([p.grad.flatten(1) for p in params], 1).norm(dim=1)
    factor = (1 / (norms + 1e-6)).clamp(max=1)
    for p in params:
        p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))
    optimizer.step()


def train_epoch(args: Args, networks: dict, optimizer, data: Tensors, epoch: int) -> Tensors:
    """One pass over the trajectories -> the mean of each loss over all samples [S]"""
    torch.manual_seed(1_000_003 * args.seed + epoch)  # a resumed run draws the same numbers
    seed = torch.arange(args.num_seeds, device=args.device)[:, None]
    order = torch.rand(data["acted"].shape[:2], device=args.device).argsort(1)
    batches = order.split(args.batch_size, 1)
    tables = symmetries(args.config, args.device)
    sums = {}
    samples = 0.0
    for number, index in enumerate(batches):
        progress = (epoch + number / len(batches)) / args.epochs
        falling = 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = args.learning_rate * falling
        games = {name: x[seed, index] for name, x in data.items()}
        which = torch.randint(len(tables[0]), index.shape, device=args.device)
        if args.augment:
            games = turn(args.config, games, tables, which)
        batch = make_batch(args.config, games)
        losses = vae_losses(args, networks, batch)
        optimizer_step(optimizer, losses["total"])
        count = batch["weight"].sum(1)
        samples = samples + count
        for name, x in losses.items():
            sums[name] = sums.get(name, 0.0) + x.detach() * count
    return {name: x / samples for name, x in sums.items()}


# ---- Checkpoints, logs
def load_checkpoint(run: str, made_by: str) -> dict:
    """run: a checkpoint, or a folder with one; made_by: the FORMAT of its script"""
    path = Path(run, "checkpoint.pt") if Path(run).is_dir() else Path(run)
    refuse(not path.exists(), f"there is no {path}; of several seeds, the first one's folder has it")
    try:
        data = path.read_bytes()
        if zlib.crc32(data[:-4]).to_bytes(4) != data[-4:]:
            raise ValueError("its checksum is wrong")
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        found = saved["format"]
    except Exception as error:
        refuse(True, f"{path} is damaged or no checkpoint: {str(error).partition(os.linesep)[0]}")
    refuse(found != made_by, f"{path} is a checkpoint of {found}, not of {made_by}")
    return saved | {"folder": path.absolute().parent}


def write_checkpoint(path: Path, content: dict) -> None:
    """Written aside and renamed, so it is always whole. Its end is a checksum"""
    data = io.BytesIO()
    torch.save({"format": FORMAT, "script": Path(__file__).name, **content}, data)
    data.write(zlib.crc32(data.getbuffer()).to_bytes(4))
    aside = path.with_suffix(".part")
    with open(aside, "wb") as file:
        file.write(data.getbuffer())
        file.flush()
        os.fsync(file.fileno())
        os.replace(aside, path)


def make_folders(args: Args, kind: str) -> list[Path]:
    """One per seed. Their names end with the second, or with a later one"""
    name = f"{args.exp_name}__{args.config.setting}_{kind}"
    seeds = range(args.seed, args.seed + args.num_seeds)
    for stamp in itertools.count(int(time.time())):
        folders = [Path(args.run_dir, f"{name}__{seed}__{stamp}") for seed in seeds]
        with contextlib.suppress(FileExistsError):
            for folder in folders:
                folder.mkdir(parents=True)
            return folders


def open_log(args: Args, folder: Path, step: int) -> SummaryWriter:
    """args.json, metrics.jsonl and TensorBoard; what was logged after `step` is dropped"""
    flags = dataclasses.asdict(args)
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps(flags, indent=2))
    path = folder / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [row for row in rows if row.endswith("\n")]
    path.write_text("".join(row for row in whole if json.loads(row)["steps"] <= step))
    writer = SummaryWriter(folder, purge_step=step + 1)
    threading.excepthook = lambda _: None  # its thread's: the next row finds a full disk
    table = [f"|{name}|{value}|" for name, value in (flags | flags["config"]).items()]
    writer.add_text("hyperparameters", "\n".join(["|flag|value|", "|-|-|", *table]))
    return writer


def log(folder: Path, writer: SummaryWriter, step: int, row: dict[str, float]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"steps": step, **row}) + "\n")
    for name, value in row.items():
        writer.add_scalar(name, value, step)


# ---- Main
def main(args: Args) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order
    torch.use_deterministic_algorithms(args.device == "cuda", warn_only=True)
    seeds = range(args.seed, args.seed + args.num_seeds)
    games = [collect(args, args.num_samples, seed, args.device) for seed in seeds]
    data = trajectories([train for train, _ in games], args.num_samples)
    held_out = trajectories([others for _, others in games])
    env_steps = [int(train["acted"].any(2).sum()) for train, _ in games]
    kinds = {"prior": SubgoalPrior, "inference": SubgoalInference}  # f_psi, q_phi
    kinds |= {"moa": ActionModel, "moa_prior": ActionModel}  # given q_phi's subgoal, f_psi's
    networks = {}
    for number, (name, kind) in enumerate(kinds.items()):
        networks[name] = Stacked(kind, args, [4 * seed + number for seed in seeds], args.device)
    params = [p for network in networks.values() for p in network.params.values()]
    optimizer = torch.optim.Adam(params, fused=True)
    epoch = 0
    if args.resume is not None:
        checkpoint = load_checkpoint(args.resume, FORMAT)
        for name, network in networks.items():
            try:
                network.network.load_state_dict(checkpoint["networks"][name])
            except RuntimeError as error:  # of an edited copy
                refuse(True, f"the checkpoint does not fit: {' '.join(str(error).split())}")
        optimizer.load_state_dict(checkpoint["optimizer"])
        epoch = checkpoint["epoch"]
        folder = checkpoint["folder"]
        folders = [folder, *(folder.parent / name for name in checkpoint["folders"][1:])]
    else:
        folders = make_folders(args, args.goal_kind)
    writers = [open_log(args, folder, epoch) for folder in folders]
    print(f"{folders[0]}: {env_steps[0]} env steps to learn from")
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the epoch is finished and saved
        signal.signal(number, lambda number, _: stop.append(number))
    bar = tqdm(initial=epoch, total=args.epochs, unit="epoch")
    while epoch < args.epochs and not stop:
        losses = train_epoch(args, networks, optimizer, data, epoch)
        epoch += 1
        refuse(not losses["total"].isfinite().all(), f"the loss is no number in epoch {epoch}")
        tables = measure(args, networks, {name: x[:, :1000] for name, x in held_out.items()})
        for seed, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
            row = {f"losses/{name}": float(loss[seed]) for name, loss in losses.items()}
            for predictor, figures in tables[seed].items():
                row |= {f"{predictor}/{name}": float(figures[name]) for name in FIGURES}
            row["charts/env_steps"] = env_steps[seed]  # played to learn from them
            row["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            log(folder, writer, epoch, row)
            write_table(folder / "evaluation", f"epoch_{epoch}", tables[seed])
        bar.set_postfix_str(f"loss {losses['total'].mean():.4g}")
        bar.update()
        flags = vars(args) | vars(args.config)
        checkpoint = {
            "networks": {name: network.state_dict() for name, network in networks.items()},
            "optimizer": optimizer.state_dict(),
            "args": dataclasses.asdict(args),
            "must_match": {name: flags[name] for name in MUST_MATCH},
            "folders": [folder.name for folder in folders],
            "epoch": epoch,
        }
        write_checkpoint(folders[0] / "checkpoint.pt", checkpoint)
    bar.close()
    if stop:
        print(f"python {sys.argv[0]} --resume {folders[0]}")
        sys.exit(128 + stop[0])
    tables = measure(args, networks, held_out)
    for folder, writer, table in zip(folders, writers, tables, strict=True):
        write_table(folder / "evaluation", "final", table)
        figure = draw(table)
        figure.savefig(folder / "evaluation" / "final.png", dpi=60)
        writer.add_figure("evaluation", figure, epoch)
    for name in tables[0]:
        means = {figure: np.mean([table[name][figure] for table in tables]) for figure in FIGURES}
        print(name.ljust(12), *(f"{figure} {mean:.4f}" for figure, mean in means.items()))
    print(f"python hopplus_ppo.py --vae-checkpoint {folders[0]}")


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # tensors are small
    try:
        args = parse_args()
    except ValueError as error:  # the game's, about wrong flags
        refuse(True, str(error))
    try:
        main(args)
    except OSError as error:  # a full disk, say
        refuse(True, f"cannot write: {error}")
