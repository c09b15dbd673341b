"""Pretrains the subgoal VAE, the subgoal inference and the model of the others' actions (MOA) on
games of rule-based players, and measures them like a classifier.

    python pretrain_vae.py                               # 4x4, continuous subgoals, both losses
    python pretrain_vae.py --goal-kind discrete --goal-dim 8 --loss moa
    python pretrain_vae.py --num-seeds 5 --height 8 --width 8 --population nearest_stag,nearest_hare
    python pretrain_vae.py --resume runs/RUN/checkpoint.pt
    python hopplus_ppo.py --vae-checkpoint runs/RUN/checkpoint.pt

A sample is one step of one player j that was on the board: (its view of the game so far) -> its
action. Two predictors are trained side by side: one infers the subgoal g from the current state
alone, one from the whole game so far. Beside them stand two exact ceilings, made from the players'
known probabilities: what can be predicted if j's kind is known, and if it has to be inferred from
the same history by Bayes' rule. `docs/pretrain_vae.md` explains every figure.

Axes: S seeds (one model each), R trajectories of T steps, n samples, N players, P prey, A actions,
D subgoal. A board is uint8 [N + P] in j's ego order: the cell of each player and of each prey, H*W
for what is not there.
"""

import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import NUM_ACTIONS, STAY, Count, NonNegative, Positive, StagHuntConfig, StagHuntEnv, Whole, refuse

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map
from tqdm import tqdm

FORMAT = "pretrain_vae.py 10"  # of a checkpoint
MUST_MATCH = ("goal_kind", "goal_dim", "subgoal_hidden")  # flags, where its networks are loaded
BOARD_MUST_MATCH = ("height", "width", "num_players", "num_stags", "num_hares", "max_wall_pieces")
MAY_CHANGE = ("epochs",)  # when a run is resumed
STATE_ONLY = "state only"
WITH_HISTORY = "with history"
BAYES_CEILING = "ceiling: Bayes from history"
KIND_KNOWN = "ceiling: kind known"
TAGS = {  # the four predictors, and their names in TensorBoard and metrics.jsonl
    STATE_ONLY: "moa_prior",
    WITH_HISTORY: "moa",
    BAYES_CEILING: "moa/bayes",
    KIND_KNOWN: "moa/ceiling",
}
PREDICTORS = tuple(TAGS)
FIGURES = ("top1", "top3", "nll", "macro_f1")  # logged of each; the table has more
MEASURED_TRAJECTORIES = 1000  # of each seed, while it trains
PROBED_TRAJECTORIES = 4000  # that the probes are fitted to


@dataclasses.dataclass
class RunArgs:
    exp_name: str = Path(__file__).stem  # first part of the run's name
    seed: Whole = 1
    """seed of the first experiment; the others count up, but are not what --seed 2, 3, ... alone
    would be"""
    num_seeds: Count = 1
    """S, experiments side by side, each with its own games, weights and TensorBoard run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"  # folder in which the runs' folders are made
    resume: str | None = None
    """continue the run of this checkpoint or run folder, bit for bit, with its flags; more --epochs
    extend it"""


@dataclasses.dataclass
class DataArgs:
    population: str = ",".join(game.POPULATION)
    """who plays the games: each seat of each game draws one of these"""
    num_samples: Count = 100_000  # samples to train on, at least
    held_out_games: Count = 1000  # further games to measure on
    augment: bool = True
    """show each game in a random one of the board's symmetries (8 if it is square, else 4)"""


@dataclasses.dataclass
class OpponentArgs:
    loss: Literal["recon", "moa", "both"] = "both"
    """what shapes the subgoals besides KL: reconstruction of the state, cross-entropy of the
    action, or both"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax"""
    goal_dim: Count = 16  # D, the size of a subgoal (discrete: the number of categories)
    subgoal_hidden: Count = 64  # width of the subgoal networks and the MOA
    kl_coef: NonNegative = 1e-3  # weight of the KL terms
    epochs: Count = 15  # passes over the samples
    batch_size: Count = 128  # trajectories per update and experiment
    learning_rate: Positive = 3e-3  # Adam's step size at the start; falls to 0 along a cosine


@dataclasses.dataclass
class Args(RunArgs, DataArgs, OpponentArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {  # the boxes of --help
    "run": RunArgs,
    "game": StagHuntConfig,
    "data": DataArgs,
    "opponent_model": OpponentArgs,
}


def make_args(**changes) -> Args:
    """Complete flags; with `resume` those of the run that goes on"""
    if changes.get("resume") is None:
        return Args(**changes)
    path = game.find_checkpoint(changes["resume"], "--resume")
    saved = game.load_checkpoint(path, FORMAT)["args"]
    return load_args(path, saved, **changes)


def load_args(path: str | Path, saved: dict, **changes) -> Args:
    """The flags of a checkpoint, with changes"""
    try:
        return Args(**saved | changes | {"config": StagHuntConfig(**saved["config"])})
    except TypeError as error:
        raise game.UserError(f"{path}: its flags are not those of this script: {error}") from error


def parse_args(words: list[str]) -> Args:
    early = game.early_flags(words, resume=None, device="auto")
    return game.parse(Args, GROUPS, make_args(**early), words)


def validate(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.population_names(args.population)
    refuse(config.num_cells > 255, f"--height, --width: a board has up to 255 cells, not {config.num_cells}")
    refuse(args.subgoal_hidden < 2, "--subgoal-hidden must be 2 or more")
    one_category = args.goal_kind == "discrete" and args.goal_dim < 2
    refuse(one_category, "--goal-kind discrete needs --goal-dim 2 or more")
    return config


# ---- Networks. Each is M networks side by side, one per learner: rows [M, n, ...], parameters [M, ...]. A row never
# looks at another, so Stacked may split a batch.


class Linear(nn.Module):
    """[M, n, inputs] -> [M, n, outputs]. Uniform weights of variance gain^2 / inputs, no bias at
    the start"""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3 / inputs)
        self.weight = nn.Parameter(torch.empty(1, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(1, outputs))

    def forward(self, x):
        if not x.is_floating_point():
            raise TypeError("a layer reads floats: in whole numbers its weights would be rounded")
        parts = len(x) // len(self.weight)  # of a batch that Stacked has split
        weight = repeat(self.weight.to(x.dtype), parts)
        bias = repeat(self.bias.to(x.dtype), parts)
        return torch.bmm(x, weight) + bias[:, None]


def repeat(x, times: int):
    """[M, ...] -> [M * times, ...]"""
    return x if times == 1 else x.repeat_interleave(times, 0)


def mlp(*sizes: int, gain: float = 1.0) -> nn.Sequential:
    """Layers with ReLU between them; gain is the last one's"""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [Linear(inputs, outputs, math.sqrt(2)), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, Linear(sizes[-2], sizes[-1], gain))


class Stacked:
    """M networks of one kind as one whose parameters are theirs: inputs [M, n, ...] -> outputs
    [M, n, ...], in float32. Inside, `dtype` holds where no gradient is asked for, `train_dtype`
    where one is."""

    def __init__(self, make, seeds: list[int], device, dtype=torch.float32, train_dtype=torch.float32):
        networks = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                networks.append(make())
        self.network = networks[0]
        parameters = [network.parameters() for network in networks]
        for first, *others in zip(*parameters, strict=True):
            if first.shape[:1] != (1,):
                raise ValueError("a parameter lacks the learners' axis, 1 at first: use Linear, not nn.Linear")
            first.data = torch.cat([first.data, *(p.data for p in others)])
        self.network.to(device)
        self.params = dict(self.network.named_parameters())
        self.dtype = dtype
        self.train_dtype = train_dtype

    def __call__(self, *inputs: torch.Tensor, method: str = "forward"):
        learning = torch.is_grad_enabled()
        dtype = self.train_dtype if learning else self.dtype
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        # On a GPU a long batch is split: as one long sum per learner, a weight's gradient leaves
        # most of it idle.
        m, n = inputs[0].shape[:2]
        parts = 1
        if learning and inputs[0].is_cuda:
            parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1)
        if parts > 1:
            inputs = [x.reshape(m * parts, n // parts, *x.shape[2:]) for x in inputs]
        outputs = getattr(self.network, method)(*inputs)

        def join(x):
            x = x.float() if x.is_floating_point() else x
            return x.reshape(m, n, *x.shape[2:])

        return tree_map(join, outputs)

    def __len__(self) -> int:
        return len(self.parameters()[0])

    def parameters(self) -> list[nn.Parameter]:
        return list(self.params.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.params.items()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        game.copy_nested_(self.state_dict(), saved)


class SumRows(torch.autograd.Function):
    """table [M, rows, width], index int64 [M, n, k] -> sums of k rows [M, n, width]. For a CPU:
    there a product with one-hot rows takes 4 to 25 times as long (4x4 to 8x8, one ARM core)."""

    @staticmethod
    def forward(table, index):
        first_row = table.shape[1] * torch.arange(len(table))  # of each table, end to end
        index = index + first_row[:, None, None]
        sums = F.embedding_bag(index.flatten(0, 1), table.flatten(0, 1), mode="sum")
        return sums.unflatten(0, index.shape[:2])

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, index = inputs
        ctx.save_for_backward(index)
        ctx.table_shape = table.shape

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        table_grad = grad.new_zeros(ctx.table_shape)
        for learner, rows in enumerate(index):
            for row in rows.unbind(1):
                table_grad[learner].index_add_(0, row, grad[learner])
        return table_grad, None


class BoardEncoder(nn.Module):
    """A board -> features. Each player and prey is looked up by its kind and its cell relative to
    the observer, or by its number if it is not there; what is found adds up."""

    def __init__(self, config: StagHuntConfig, hidden: int):
        super().__init__()
        players = config.num_players
        cells = config.num_cells
        wide = 2 * config.width - 1
        spots = (2 * config.height - 1) * wide
        row, column = np.divmod(np.arange(cells), config.width)
        down = row - row[:, None] + config.height - 1
        right = column - column[:, None] + config.width - 1
        kinds = [*range(players), *[players] * config.num_stags, *[players + 1] * config.num_hares]
        entity = np.arange(len(kinds))
        first_row = spots * np.array(kinds)[:, None, None]
        own_row = spots * (players + 2)  # the observer itself is looked up by its cell on the board
        missing = own_row + cells + entity
        lookup = np.empty((len(kinds), cells + 1, cells + 1), int)  # [entity, own cell, its cell]
        lookup[:] = missing[:, None, None]
        lookup[:, :cells, :cells] = first_row + down * wide + right
        lookup[:, cells] = lookup[:, 0]  # who has left sees the board from its first cell
        lookup[0, :cells] = own_row + np.arange(cells)[:, None]
        rows = own_row + cells + len(kinds)
        rows += -rows % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("entity", torch.tensor(entity), persistent=False)
        self.table = nn.Parameter(0.1 * torch.randn(1, rows, 2 * hidden))
        self.walls = Linear(cells, 2 * hidden) if config.max_wall_pieces else None
        self.mix = mlp(2 * hidden, hidden, gain=math.sqrt(2))

    def forward(self, board, walls):
        """int64 [M, n, N + P], float [M, n, H*W] (without walls: [M, n, 1]) -> [M, n, hidden]"""
        row = self.lookup[self.entity, board[..., :1], board]
        table = self.table.to(walls.dtype)
        if row.is_cuda:  # the same as a product: the gradient of a lookup is slow on a GPU
            table = repeat(table, len(row) // len(table))
            zeros = table.new_zeros(*row.shape[:2], table.shape[1])
            x = torch.bmm(zeros.scatter(2, row, 1.0), table)
        else:
            whole = row.reshape(len(table), -1, row.shape[2])
            x = SumRows.apply(table, whole).view(*row.shape[:2], -1)
        if self.walls is not None:
            x = x + self.walls(walls)
        return self.mix(x.relu()).relu_()


def num_goal_params(args: Args) -> int:
    """Mean and log-variance of each number, or a logit of each category"""
    return 2 * args.goal_dim if args.goal_kind == "continuous" else args.goal_dim


class SubgoalPrior(nn.Module):
    """f_psi, a VAE: state -> distribution over subgoals; subgoal -> state"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.head = Linear(hidden, num_goal_params(args))
        self.decoder = mlp(args.goal_dim, hidden, math.prod(config.observation_shape))

    def forward(self, board, walls):
        return self.head(self.encoder(board, walls))

    def reconstruct(self, goal):
        return self.decoder(goal)


class SubgoalInference(nn.Module):
    """q_phi, a CVAE after OMG: the co-player's history up to t - 1 and the state s_t ->
    distribution over subgoals; subgoal and history -> state. A history is two sums of events, of
    this game and of earlier ones, as Bayes' rule adds up evidence; their first entries count."""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.events = mlp(hidden + NUM_ACTIONS * config.num_players, hidden, hidden)
        self.head = mlp(3 * hidden, hidden, num_goal_params(args))
        self.decoder = mlp(args.goal_dim + 2 * hidden, hidden, math.prod(config.observation_shape))

    def event(self, features, joint):
        """features [M, n, hidden], joint action [M, n, N] -> what the step adds to the history
        [M, n, hidden]"""
        acts = F.one_hot(joint, NUM_ACTIONS).flatten(2).to(features.dtype)
        event = self.events(torch.cat([features, acts], 2))
        return F.pad(event[..., 1:], (1, 0), value=1.0)

    @staticmethod
    def read(history):
        """[M, n, 2 * hidden]: evidence grows with the number of events, its noise with the root"""
        sums = history.unflatten(2, (2, -1))  # of this game and of earlier ones
        return (sums / (1 + sums[..., :1]).sqrt()).flatten(2)

    def forward(self, features, history):
        return self.head(torch.cat([features, self.read(history)], 2))

    def reconstruct(self, goal, history):
        return self.decoder(torch.cat([goal, self.read(history)], 2))


class ActionModel(nn.Module):
    """MOA, pi_omega: state seen from j, clock and subgoal of j -> log-probabilities of j's
    action"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.head = mlp(hidden + 8 + args.goal_dim, hidden, hidden, NUM_ACTIONS, gain=0.01)

    def forward(self, board, walls, clock, goal, legal):
        clock = F.pad(clock[..., None], (0, 7))  # rows of a multiple of 8, as in BoardEncoder
        logits = self.head(torch.cat([self.encoder(board, walls), clock, goal], 2))
        return logits.float().masked_fill(~legal, -1e9).log_softmax(2)


def goal_mean(kind: str, params):
    return params.chunk(2, -1)[0] if kind == "continuous" else params.softmax(-1)


def goal_noise(args: Args, *shape, device):
    """[*shape, D]: standard normal, or Gumbel for discrete subgoals"""
    if args.goal_kind == "continuous":
        return torch.randn(*shape, args.goal_dim, device=device)
    uniform = torch.rand(*shape, args.goal_dim, device=device).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(uniform))


def sample_goal(kind: str, params, noise):
    """Reparameterised, or straight-through Gumbel-softmax of temperature 0.5"""
    if kind == "continuous":
        mean, log_var = params.chunk(2, -1)
        return mean + noise * (0.5 * log_var.clamp(-8, 4)).exp()
    soft = ((params + noise) / 0.5).softmax(-1)
    return F.one_hot(soft.argmax(-1), soft.shape[-1]) + soft - soft.detach()


def goal_kl(kind: str, q, p):
    """KL(q || p) [...] of distributions [..., parameters]"""
    if kind == "discrete":
        return (q.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1))).sum(-1)
    q_mean, q_log_var = q.chunk(2, -1)
    p_mean, p_log_var = p.chunk(2, -1)
    q_log_var = q_log_var.clamp(-8, 4)
    p_log_var = p_log_var.clamp(-8, 4)
    ratio = (q_log_var - p_log_var).exp() + (q_mean - p_mean).square() / p_log_var.exp()
    return 0.5 * (ratio - 1 - q_log_var + p_log_var).sum(-1)


def make_models(args: Args, config: StagHuntConfig, seeds: list[int], device) -> dict[str, Stacked]:
    """One of each per seed"""
    kinds = {
        "prior": SubgoalPrior,  # f_psi
        "inference": SubgoalInference,  # q_phi
        "moa": ActionModel,  # given q_phi's subgoal
        "moa_prior": ActionModel,  # given f_psi's subgoal of the present state
    }
    models = {}
    for number, (name, kind) in enumerate(kinds.items()):
        model_seeds = [4 * seed + number for seed in seeds]
        models[name] = Stacked(functools.partial(kind, config, args), model_seeds, device)
    return models


# ---- Data


class Trajectories(NamedTuple):
    """R players' games of T steps, each seen by that player j. All seeds: [S, R, T, ...]"""

    board: torch.Tensor  # uint8 [R, T, N + P]
    walls: torch.Tensor  # uint8 [R, T, H*W] (one 0 where the game has none)
    joint: torch.Tensor  # uint8 [R, T, N] in j's ego order
    legal: torch.Tensor  # bool [R, T, 7] j's legal actions
    acted: torch.Tensor  # bool [R, T] j was on the board before the step, and the game not over
    bayes: torch.Tensor  # [R, T, 7] the best prediction of j's action from what it did before
    known: torch.Tensor  # [R, T, 7] j's own probabilities
    prey: torch.Tensor  # int64 [R] what j ended with: 0 nothing, 1 a stag, 2 a hare


def play_trajectories(env: StagHuntEnv, population: str) -> Trajectories:
    """One game in each place, seen by each of its players: R = games * N"""
    config = env.config
    players = config.num_players
    table = ["mixed"] * players
    seats = game.Seats(env, [table], population=population, redraw="never", remember=True)
    prey = torch.zeros(env.num_envs, players, dtype=torch.int64, device=env.device)
    state = env.initial_state()
    steps = []
    for _ in range(config.final_time):
        known = seats.action_probs(state)
        bayes = seats.posterior_probs(seats.posterior())
        actions = game.sample(known)
        after, _, acted, done = env.transition(state, actions)
        seats.update(actions, acted, done)
        walls = state.walls[:, None, : config.num_wall_cells]
        joint = env.seats_to_ego(torch.where(acted, actions, STAY))
        steps.append(
            {
                "board": env.cells(state),
                "walls": walls.expand(-1, players, -1),
                "joint": joint.byte(),
                "legal": env.legal_actions(state),
                "acted": acted,
                "bayes": bayes,
                "known": known,
            }
        )
        left = state.present & ~after.present
        prey = torch.where(left, actions - STAY, prey)  # hunting a stag is action 5, a hare 6
        state = after
    fields = tree_map(lambda *x: torch.stack(x, 2).flatten(0, 1), *steps)
    return Trajectories(**fields, prey=prey.flatten())


def collect_trajectories(args: Args, config: StagHuntConfig, seed: int, device):
    """-> Trajectories to train on, with at least --num-samples samples; of --held-out-games others,
    to measure on"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, 256, device, seed)
    train = play_trajectories(env, args.population)
    while int(train.acted.sum()) < args.num_samples:
        more = play_trajectories(env, args.population)
        train = tree_map(lambda *x: torch.cat(x), train, more)
    samples = train.acted.sum(1).cumsum(0)
    rows = int((samples < args.num_samples).sum()) + 1
    rounds = math.ceil(args.held_out_games / env.num_envs)
    held_out = [play_trajectories(env, args.population) for _ in range(rounds)]
    held_out_rows = args.held_out_games * config.num_players
    held_out = tree_map(lambda *x: torch.cat(x)[:held_out_rows], *held_out)
    return tree_map(lambda x: x[:rows], train), held_out


def stack_seeds(trajectories: list[Trajectories]) -> Trajectories:
    """One per seed [R, ...] -> [S, R, ...], filled up with steps at which nobody acted"""
    return tree_map(lambda *x: pad_sequence(x, batch_first=True), *trajectories)


def watched_steps(config: StagHuntConfig, acted) -> float:
    """Env steps of the games in acted bool [S, R, T], mean over seeds; the N players of a game are
    neighbours"""
    missing = -acted.shape[1] % config.num_players  # of the last game
    of_games = F.pad(acted, (0, 0, 0, missing)).unflatten(1, (-1, config.num_players))
    return float(of_games.any(2).sum()) / len(acted)


def first_rows(data, count: int):
    """Of each seed, [S, n, ...]"""
    return tree_map(lambda x: x[:, :count], data)


def turned_cells(height: int, width: int, flip: bool, turns: int) -> np.ndarray:
    """[H*W]: where each cell goes when the board is flipped, then turned"""
    grid = np.arange(height * width).reshape(height, width)
    if flip:
        grid = np.flip(grid, 1)
    return np.argsort(np.rot90(grid, turns).flatten())


class Symmetries(NamedTuple):
    """The 8 symmetries of a square board, the 4 of another"""

    cells: torch.Tensor  # int64 [8 or 4, H*W + 1] where each cell goes
    actions: torch.Tensor  # int64 [8 or 4, 7] what each action becomes


def symmetries(config: StagHuntConfig, device) -> Symmetries:
    moves = [1, 7, 3, 5]  # up, down, left, right of the middle of a 3x3 board
    turns = (0, 1, 2, 3) if config.height == config.width else (0, 2)
    cells = []
    actions = []
    for symmetry in itertools.product((False, True), turns):
        to = turned_cells(config.height, config.width, *symmetry)
        cells.append([*to.tolist(), config.num_cells])
        turned_moves = turned_cells(3, 3, *symmetry)[moves]
        actions.append([*map(moves.index, turned_moves), *range(STAY, NUM_ACTIONS)])
    return Symmetries(torch.tensor(cells, device=device), torch.tensor(actions, device=device))


class Batch(NamedTuple):
    """n samples of B trajectories of T steps, packed: only steps at which j acted, and a few to
    fill up"""

    board: torch.Tensor  # int64 [S, n, N + P]
    walls: torch.Tensor  # float [S, n, _]
    joint: torch.Tensor  # int64 [S, n, N]
    legal: torch.Tensor  # bool [S, n, 7]
    weight: torch.Tensor  # float [S, n] 1 where j acted, else 0
    clock: torch.Tensor  # float [S, n]
    place: torch.Tensor  # int64 [S, n] trajectory * T + step
    last: torch.Tensor  # int64 [S, n] which sample is the last of the same trajectory: s^g
    shape: tuple[int, int]  # B, T


def make_batch(config: StagHuntConfig, data: Trajectories, index, samples: int) -> Batch:
    """data [S, R, ...], index [S, B] of trajectories, samples n"""
    seed = torch.arange(len(index), device=index.device)[:, None]
    steps = data.acted.shape[2]
    acted = data.acted[seed, index].flatten(1)  # [S, B*T]
    place = acted.int().argsort(dim=1, descending=True, stable=True)[:, :samples]
    trajectory = place // steps
    step = place % steps
    row = index.gather(1, trajectory)
    number = torch.arange(samples, device=index.device).expand_as(place)
    sample_at = torch.zeros_like(acted, dtype=torch.int64).scatter(1, place, number)
    places = torch.arange(1, 1 + acted.shape[1], device=index.device)
    last_place = (acted * places).unflatten(1, (-1, steps)).amax(2) - 1  # [S, B]
    last_place = last_place.clamp(min=0).gather(1, trajectory)
    return Batch(
        board=data.board[seed, row, step].long(),
        walls=data.walls[seed, row, step].float(),
        joint=data.joint[seed, row, step].long(),
        legal=data.legal[seed, row, step],
        weight=acted.gather(1, place).float(),
        clock=step / config.final_time,
        place=place,
        last=sample_at.gather(1, last_place),
        shape=(index.shape[1], steps),
    )


def turn_batch(config: StagHuntConfig, batch: Batch, to: Symmetries, which) -> Batch:
    """Each trajectory under one of the symmetries, which [S, B]"""
    which = which.gather(1, batch.place // batch.shape[1])  # [S, n]
    walls = batch.walls
    if config.max_wall_pieces:
        walls = walls.gather(2, to.cells[:, :-1].argsort(1)[which])
    return batch._replace(
        board=to.cells[which].gather(2, batch.board),
        walls=walls,
        joint=to.actions[which].gather(2, batch.joint),
        legal=batch.legal.gather(2, to.actions.argsort(1)[which]),
    )


# ---- Losses


def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    total = (x * weight).flatten(1).sum(1)
    return total / weight.flatten(1).sum(1).clamp(min=1e-6)


def infer_trajectories(inference: Stacked, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """-> q_phi's parameters [S, n, _], the histories [S, n, 2 * hidden] of what came before each
    sample"""
    features = inference(batch.board, batch.walls, method="encoder")
    event = inference(features, batch.joint, method="event")
    trajectories, steps = batch.shape
    place = batch.place[..., None].expand_as(event)
    grid = event.new_zeros(len(event), trajectories * steps, event.shape[2]).scatter(1, place, event)
    earlier = event.new_ones(steps, steps).tril(-1)  # [t, u]: event u comes before step t
    history = (earlier @ grid.unflatten(1, batch.shape)).flatten(1, 2)
    history = history.gather(1, place)
    history = F.pad(history, (0, history.shape[2]))  # no earlier games
    return inference(features, history), history


def action_log_probs(args: Args, moa: Stacked, batch: Batch, params, goals) -> torch.Tensor:
    """[S, n, 7], averaged over the subgoals drawn [S, n, k, D], or exactly over all categories:
    from straight-through draws alone the encoder would learn to use one category for everything"""
    log_weights = goals.new_full(goals.shape[:3], -math.log(goals.shape[2]))
    if args.goal_kind == "discrete":
        goals = torch.eye(args.goal_dim, device=params.device).expand(*params.shape, -1)
        log_weights = params.log_softmax(-1)
    k = goals.shape[2]
    log_probs = moa(
        batch.board.repeat_interleave(k, 1),
        batch.walls.repeat_interleave(k, 1),
        batch.clock.repeat_interleave(k, 1),
        goals.flatten(1, 2),
        batch.legal.repeat_interleave(k, 1),
    )
    log_probs = log_probs.unflatten(1, (-1, k)) + log_weights[..., None]
    return log_probs.logsumexp(2)


def reconstruction_error(config: StagHuntConfig, batch: Batch, logits) -> torch.Tensor:
    """[S]: logits [S, n, C*H*W] of the planes that j saw"""
    planes = game.planes(config, batch.board, batch.walls).flatten(2).float()
    error = F.binary_cross_entropy_with_logits(logits, planes, reduction="none")
    return masked_mean(error.mean(2), batch.weight)


def action_loss(args: Args, moa: Stacked, batch: Batch, params, goal) -> torch.Tensor:
    """[S]: MOA's cross-entropy given j's subgoal"""
    if args.loss == "recon":  # MOA learns too, but on subgoals that it cannot move
        params = params.detach()
        goal = goal.detach()
    log_probs = action_log_probs(args, moa, batch, params, goal[:, :, None])
    action = batch.joint[..., :1]
    return masked_mean(-log_probs.gather(2, action)[..., 0], batch.weight)


def vae_losses(args: Args, config, models: dict, batch: Batch, noise) -> dict[str, torch.Tensor]:
    """Each [S], the mean over the samples at which j was on the board; noise [2, S, n, D]. `vae` is
    the side that sees the state only, `cvae` the one with history."""
    prior = models["prior"](batch.board, batch.walls)
    posterior, history = infer_trajectories(models["inference"], batch)
    # The hindsight subgoal s^g is the last state before j left; f_psi is not moved by it.
    last = batch.last[..., None].expand_as(prior)
    hindsight = prior.detach().gather(1, last)
    standard = torch.zeros_like(prior)
    losses = {}

    goal = sample_goal(args.goal_kind, prior, noise[0])
    logits = models["prior"](goal, method="reconstruct")
    kl = goal_kl(args.goal_kind, prior, standard)
    losses["losses/recon_vae"] = reconstruction_error(config, batch, logits)
    losses["losses/kl_vae"] = masked_mean(kl, batch.weight)
    losses["losses/moa_vae"] = action_loss(args, models["moa_prior"], batch, prior, goal)

    goal = sample_goal(args.goal_kind, posterior, noise[1])
    logits = models["inference"](goal, history, method="reconstruct")
    kl = goal_kl(args.goal_kind, posterior, hindsight)
    losses["losses/recon_cvae"] = reconstruction_error(config, batch, logits)
    losses["losses/kl_cvae"] = masked_mean(kl, batch.weight)
    losses["losses/moa_cvae"] = action_loss(args, models["moa"], batch, posterior, goal)

    recon_coef = 0.0 if args.loss == "moa" else 1.0
    losses["losses/total"] = (
        recon_coef * losses["losses/recon_vae"]
        + args.kl_coef * losses["losses/kl_vae"]
        + losses["losses/moa_vae"]
        + recon_coef * losses["losses/recon_cvae"]
        + args.kl_coef * losses["losses/kl_cvae"]
        + losses["losses/moa_cvae"]
    )
    return losses


# ---- Measuring


@torch.no_grad()
def predict_probs(args: Args, config, models: dict, data: Trajectories, size: int = 512, draws: int = 8):
    """-> probabilities of the four PREDICTORS [4, S, R, T, 7], the mean subgoals of the first two
    [2, S, R, T, D]"""
    device = data.acted.device
    num_seeds, num_rows, steps = data.acted.shape
    seed = torch.arange(num_seeds, device=device)[:, None]
    nothing = torch.zeros_like(data.known)
    probs = torch.stack([nothing, nothing, data.bayes, data.known])
    goals = torch.zeros(2, *data.acted.shape, args.goal_dim, device=device)
    torch.manual_seed(0)
    for rows in torch.arange(num_rows, device=device).split(size):
        index = rows.expand(num_seeds, -1)
        samples = data.acted[:, rows].sum((1, 2)).max().clamp(min=1)
        batch = make_batch(config, data, index, int(samples))
        row = index.gather(1, batch.place // steps)
        step = batch.place % steps
        prior = models["prior"](batch.board, batch.walls)
        posterior, _ = infer_trajectories(models["inference"], batch)
        sides = [(models["moa_prior"], prior), (models["moa"], posterior)]
        for side, (moa, params) in enumerate(sides):
            noise = goal_noise(args, *params.shape[:2], draws, device=device)
            drawn = sample_goal(args.goal_kind, params[:, :, None], noise)
            log_probs = action_log_probs(args, moa, batch, params, drawn)
            probs[side, seed, row, step] = log_probs.exp()
            goals[side, seed, row, step] = goal_mean(args.goal_kind, params)
    return probs, goals


def confusion_matrix(probs: np.ndarray, action: np.ndarray) -> np.ndarray:
    """probs [n, 7], action [n] -> [true, predicted]. Where actions are equally likely (within 0.1),
    the prediction is split between them: else the order of the actions would decide who is
    right."""
    tied = probs >= probs.max(1, keepdims=True) - 0.1
    confusion = np.zeros((NUM_ACTIONS, NUM_ACTIONS))
    np.add.at(confusion, action, tied / tied.sum(1, keepdims=True))
    return confusion


def classifier_figures(probs: np.ndarray, action: np.ndarray, confusion: np.ndarray) -> dict[str, float]:
    """probs [n, 7], action [n], confusion [7, 7] -> FIGURES, and others of each action"""
    hits = np.diag(confusion)
    count = confusion.sum(1)
    guessed = confusion.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = hits / guessed
        recall = hits / count
        f1 = np.nan_to_num(2 * hits / (count + guessed))
    right = probs.argmax(1) == action
    ranking = np.argsort(-probs, 1, kind="stable")
    likelihood = probs[np.arange(len(action)), action]
    figures = {
        "top1": right.mean(),
        "top3": (ranking[:, :3] == action[:, None]).any(1).mean(),
        "nll": -np.log(np.maximum(likelihood, 1e-12)).mean(),
        "macro_f1": f1[count > 0].mean(),
    }
    for a in range(NUM_ACTIONS):
        figures[f"count/{a}"] = count[a]
        figures[f"precision/{a}"] = precision[a]
        figures[f"recall/{a}"] = recall[a]
        figures[f"f1/{a}"] = f1[a]
    return {name: float(value) for name, value in figures.items()}


def probe(goals, prey, weight, test_goals, test_prey, updates: int = 200) -> torch.Tensor:
    """Does a linear reading of g tell which prey j will take? Fitted to goals [R, T, D], prey [R],
    weight [R, T] -> bool [R, T]: right on the test"""
    linear = nn.Linear(goals.shape[2], 3, device=goals.device)
    for p in linear.parameters():
        nn.init.zeros_(p)
    scale = goals.std((0, 1)).clamp(min=1e-6)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.1)
    label = prey[:, None].expand(goals.shape[:2])
    for _ in range(updates):
        logits = linear(goals / scale).movedim(2, 1)
        error = F.cross_entropy(logits, label, reduction="none")
        optimizer.zero_grad()
        ((error * weight).sum() / weight.sum()).backward()
        optimizer.step()
    return linear(test_goals / scale).argmax(2) == test_prey[:, None]


def share_by_step(right, acted) -> list[float]:
    """bool [R, T] -> of each step"""
    return ((right & acted).sum(0) / acted.sum(0)).tolist()


def measure(args: Args, config, models: dict, held_out: Trajectories, train: Trajectories | None = None):
    """-> per seed {predictor: figures}, {predictor: arrays to draw}; with probes if there is
    something to fit them to"""
    probs, goals = predict_probs(args, config, models, held_out)
    if train is not None:
        _, train_goals = predict_probs(args, config, models, train)
    tables = []
    arrays = []
    for seed, acted in enumerate(held_out.acted):
        action = held_out.joint[seed, ..., 0].long()
        true_action = action[acted].cpu().numpy()
        table = {}
        drawn = {}
        for number, name in enumerate(PREDICTORS):
            predicted = probs[number, seed]
            sample_probs = predicted[acted].cpu().numpy()
            confusion = confusion_matrix(sample_probs, true_action)
            right = predicted.argmax(2) == action
            table[name] = classifier_figures(sample_probs, true_action, confusion)
            drawn[name] = {"confusion": confusion, "by_step": share_by_step(right, acted)}
            if train is not None and name in (STATE_ONLY, WITH_HISTORY):
                probed = probe(
                    train_goals[number, seed],
                    train.prey[seed],
                    train.acted[seed].float(),
                    goals[number, seed],
                    held_out.prey[seed],
                )
                table[name]["probe_accuracy"] = float((probed & acted).sum() / acted.sum())
                drawn[name]["probe_by_step"] = share_by_step(probed, acted)
        tables.append(table)
        arrays.append(drawn)
    return tables, arrays


# ---- Tables and pictures


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return math.nan, math.nan
    if len(values) == 1:
        return values[0], math.nan
    half_width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half_width)


def write_csv(path: Path, table: dict[str, dict[str, float]]) -> None:
    """One line per figure, a column for each predictor"""
    lines = [["metric", *table]]
    for name in table[WITH_HISTORY]:
        lines.append([name, *(figures.get(name, math.nan) for figures in table.values())])
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)


def show_table(tables: list[dict]) -> None:
    """Means over seeds"""
    recalls = [f"recall/{a}" for a in range(NUM_ACTIONS)]
    print(" " * 16, *(name.rjust(30) for name in PREDICTORS), sep="")
    for figure in (*FIGURES, *recalls, "probe_accuracy"):
        cells = []
        for name in PREDICTORS:
            mean, half = interval([table[name].get(figure, math.nan) for table in tables])
            cells.append(f"{mean:.4f} ± {half:.4f}".replace(" ± nan", ""))
        print(figure.ljust(16), *(cell.rjust(30) for cell in cells), sep="")


def draw_confusion(arrays: dict[str, dict]) -> Figure:
    """A matrix for each predictor, whose rows sum to 1"""
    figure = Figure((12, 11), layout="tight")
    axes = figure.subplots(2, 2).flat
    for axis, (name, drawn) in zip(axes, arrays.items(), strict=True):
        counts = drawn["confusion"].sum(1)
        share = drawn["confusion"] / np.maximum(counts, 1)[:, None]
        axis.imshow(share, cmap="Blues", alpha=0.6, vmin=0, vmax=1)
        for (row, column), value in np.ndenumerate(share):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center")
        labels = []
        for action, count in zip(game.ACTION_NAMES, counts, strict=True):
            labels.append(f"{action} ({count:.0f})")
        axis.set_xticks(range(NUM_ACTIONS), game.ACTION_NAMES, rotation=40)
        axis.set_yticks(range(NUM_ACTIONS), labels)
        axis.set(title=name, xlabel="predicted", ylabel="true (how often)")
    return figure


def draw_by_step(arrays: dict[str, dict]) -> Figure:
    """Top-1 and probe accuracy by step of the game"""
    figure = Figure((11, 3.6), layout="tight")
    top1, probes = figure.subplots(1, 2)
    for name, drawn in arrays.items():
        top1.plot(drawn["by_step"], label=name)
        probes.plot(drawn.get("probe_by_step", []), label=name)
    top1.set(xlabel="step of the game", title="top-1: how fast is a co-player recognised?")
    top1.legend(fontsize=7)
    title = "probe accuracy: does g tell which prey j will take?"
    probes.set(xlabel="step of the game", title=title)
    return figure


def draw_pictures(folder: Path, writer, arrays: dict[str, dict], step: int) -> None:
    """Into the run's folder and TensorBoard"""
    figures = {"confusion": draw_confusion(arrays), "by_step": draw_by_step(arrays)}
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=75)
        image = np.array(Image.open(path).convert("RGB"))
        writer.add_image(name, image, step, dataformats="HWC")


# ---- Training


def optimizer_step(optimizer: torch.optim.Adam, loss, max_norm: float) -> None:
    """One step down the sum of losses [S]; each model's gradient is clipped to max_norm"""
    optimizer.zero_grad()
    loss.sum().backward()
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
    optimizer.step()


def train_epoch(args: Args, config, models: dict, optimizer, data: Trajectories, epoch: int):
    """One pass over the trajectories [S, R, ...] -> the mean of every loss over all samples, a list
    of S each"""
    torch.manual_seed(1_000_003 * args.seed + epoch)  # so a resumed run goes on with the same numbers
    device = data.acted.device
    to = symmetries(config, device)
    order = torch.rand(data.acted.shape[:2], device=device).argsort(1)
    batches = order.split(args.batch_size, 1)
    samples = data.acted.sum(2)  # [S, R]
    sizes = [samples.gather(1, index).sum(1).max() for index in batches]
    sizes = torch.stack(sizes).tolist()
    sums = {}
    total = 0.0
    for number, (index, size) in enumerate(zip(batches, sizes, strict=True)):
        progress = (epoch + number / len(batches)) / args.epochs
        rate = args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate
        which = torch.randint(len(to.cells), index.shape, device=device)
        batch = make_batch(config, data, index, size)
        if args.augment:
            batch = turn_batch(config, batch, to, which)
        noise = goal_noise(args, 2, *batch.clock.shape, device=device)
        losses = vae_losses(args, config, models, batch, noise)
        optimizer_step(optimizer, losses["losses/total"], 1.0)
        count = batch.weight.sum(1)
        total = total + count
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.detach() * count
    return {name: (value / total).tolist() for name, value in sums.items()}


def log_rows(losses: dict[str, list[float]], tables: list[dict], learning_rate: float) -> list[dict]:
    """A row of metrics per seed"""
    rows = []
    for seed, table in enumerate(tables):
        row = {name: values[seed] for name, values in losses.items()}
        for name, tag in TAGS.items():
            for figure in FIGURES:
                row[f"{tag}/{figure}"] = table[name][figure]
        row["charts/learning_rate"] = learning_rate
        rows.append(row)
    return rows


# ---- Main


def resume_run(args: Args, device: torch.device) -> tuple[Args, dict]:
    """-> the flags with the path of the checkpoint, the checkpoint"""
    args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
    checkpoint = game.load_checkpoint(args.resume, FORMAT)
    game.check_resume(args, load_args(args.resume, checkpoint["args"]), MAY_CHANGE)
    kind = checkpoint["device"]
    start = f"--resume {args.resume} is a run on {kind}"
    refuse(kind != device.type, f"{start}: it cannot go on on {device.type}")
    epoch = checkpoint["step"]
    refuse(epoch > args.epochs, f"--epochs {args.epochs}: the run has {epoch} already")
    return args, checkpoint


def load_models(models: dict[str, Stacked], optimizer, checkpoint: dict) -> None:
    weights = {**checkpoint["networks"], "moa_prior": checkpoint["moa_prior"]}
    for name, stacked in models.items():
        stacked.load_state_dict(weights[name])
    optimizer.load_state_dict(checkpoint["optimizer"])


def save_run(run: game.Run, args: Args, models: dict, optimizer, epoch: int, seconds: float) -> None:
    weights = {name: stacked.state_dict() for name, stacked in models.items()}
    flags = {name: getattr(args, name) for name in MUST_MATCH}
    board = {name: getattr(args.config, name) for name in BOARD_MUST_MATCH}
    content = {
        "format": FORMAT,
        "args": dataclasses.asdict(args),
        "device": models["moa"].parameters()[0].device.type,
        "step": epoch,
        "must_match": {**flags, **board},
        "moa_prior": weights.pop("moa_prior"),
        "networks": weights,
        "optimizer": optimizer.state_dict(),
        "seconds": seconds,
    }
    run.save(content)


def write_results(run: game.Run, tables: list[dict], arrays: list[dict], epoch: int, draw: bool) -> None:
    """Of each seed: a CSV and pictures"""
    for folder, writer, table, drawn in zip(run.folders, run.writers, tables, arrays, strict=True):
        write_csv(folder / "evaluation" / "final.csv", table)
        if draw:
            with game.never_fatal("draw"):
                accuracy = table[WITH_HISTORY]["probe_accuracy"]
                writer.add_scalar("omg/probe_accuracy", accuracy, epoch)
                draw_pictures(folder, writer, drawn, epoch)


def main(args: Args) -> dict[str, float]:
    """Returns the final figures, averaged over seeds, as {"with history/top1": ...}."""
    started = time.monotonic()
    config = validate(args)
    device = game.resolve_device(args.device)
    checkpoint = None
    epoch = 0
    if args.resume is None:
        game.check_run_flags(args)
    else:
        args, checkpoint = resume_run(args, device)
        epoch = checkpoint["step"]
        started -= checkpoint["seconds"]
    if device.type == "cuda":  # sums in the same order in each run
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    models = make_models(args, config, seeds, device)
    games = [collect_trajectories(args, config, seed, device) for seed in seeds]
    data = stack_seeds([train for train, _ in games])
    held_out = stack_seeds([held_out for _, held_out in games])
    params = [p for stacked in models.values() for p in stacked.parameters()]
    optimizer = torch.optim.Adam(params, args.learning_rate, fused=True)
    if checkpoint:
        load_models(models, optimizer, checkpoint)
    unfinished = epoch < args.epochs
    run = game.Run(args, f"{config.setting}_{args.goal_kind}", checkpoint, epoch)
    path = run.folders[0] / "checkpoint.pt"
    with contextlib.closing(run), game.stop_requests() as stop:
        print(f"{config.setting}, {args.goal_kind} subgoals, on {device}; run folder {run.folders[0]}", flush=True)
        print(f"to learn from, in each seed: {watched_steps(config, data.acted):.0f} env steps")
        with tqdm(initial=epoch, total=args.epochs, unit="epoch", mininterval=1) as bar:
            while epoch < args.epochs and not stop:
                losses = train_epoch(args, config, models, optimizer, data, epoch)
                epoch += 1
                tables, _ = measure(args, config, models, first_rows(held_out, MEASURED_TRAJECTORIES))
                run.log(epoch, log_rows(losses, tables, optimizer.param_groups[0]["lr"]))
                seconds = time.monotonic() - started
                for name, values in losses.items():
                    if not np.isfinite(values).all():
                        raise FloatingPointError(f"{name} is {values} (epoch {epoch})")
                top1 = np.mean([table[WITH_HISTORY]["top1"] for table in tables])
                ceiling = np.mean([table[BAYES_CEILING]["top1"] for table in tables])
                loss = np.mean(losses["losses/total"])
                bar.set_postfix_str(f"loss {loss:.4g}, top-1 {top1:.4f} (ceiling {ceiling:.4f})")
                bar.update()
                save_run(run, args, models, optimizer, epoch, seconds)
        if epoch < args.epochs:
            print(f"stopped; go on with: {shlex.join(['python', sys.argv[0], '--resume', str(path)])}")
            raise SystemExit(128 + stop[0])
        tables, arrays = measure(args, config, models, held_out, first_rows(data, PROBED_TRAJECTORIES))
        write_results(run, tables, arrays, epoch, draw=unfinished)
    show_table(tables)
    print(f"{time.monotonic() - started:.1f} s in all; checkpoint, CSV and pictures in {run.folders[0]}")
    results = {"checkpoint": str(path)}
    for name in PREDICTORS:
        for figure in tables[0][name]:
            results[f"{name}/{figure}"] = interval([table[name][figure] for table in tables])[0]
    return results


if __name__ == "__main__":
    game.command_line(parse_args, main)
