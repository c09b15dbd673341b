"""Pretrains the world model on games of rule-based players, and measures it like a simulator.

    python pretrain_world_model.py                       # structured head, 4x4, 50 000 transitions
    python pretrain_world_model.py --wm-head pixel       # the per-pixel MSE head, for comparison
    python pretrain_world_model.py --num-seeds 5 --height 8 --width 8
    python pretrain_world_model.py --resume runs/RUN/checkpoint.pt
    python evaluation/world_model.py runs/RUN --height 6 --width 9    # measure it again, on another board
    python hopplus_ppo.py --world-model-checkpoint runs/RUN/checkpoint.pt

A transition is one player's view of one step: (its board, the joint action in its ego order) ->
(its board one step later, its own reward). `docs/pretrain_world_model.md` explains every figure.

Axes: S seeds, one model each, G games, T steps, N players, P prey, C planes, n rows of any kind. A
board is uint8 [N + P] in the observer's ego order: the cell of each player and of each prey, H*W
for what is not there.
"""

import contextlib
import csv
import dataclasses
import itertools
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import HUNT_STAG, NUM_ACTIONS, STAY, Count, Positive, StagHuntConfig, StagHuntEnv, Whole, refuse

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from tqdm import tqdm

FORMAT = "pretrain_world_model.py 10"  # of a checkpoint
RULES_MUST_MATCH = ("num_players", "stag_reward", "hare_reward")
MAY_CHANGE = ("num_updates", "log_every")  # when a run is resumed
STEPS_AHEAD = (1, 3, 5, 10, 20)
EVENTS = ("none", "hare", "stag")
MEASURED_TRANSITIONS = 10_000  # of each seed, while it trains
DRAWN_TRANSITIONS = 4000  # of each seed, in the pictures


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
    """continue the run of this checkpoint or run folder, bit for bit, with its flags; more
    --num-updates extend it, --log-every may change too"""
    log_every: Count = 200  # updates between two measurements, which are also checkpoints


@dataclasses.dataclass
class DataArgs:
    population: str = ",".join(game.POPULATION)
    """who plays the games: each seat of each game draws one of these"""
    num_transitions: Count = 50_000  # transitions to train on
    held_out_games: Count = 1000  # further games to measure on


@dataclasses.dataclass
class WorldModelArgs:
    wm_head: Literal["structured", "pixel"] = "structured"
    """a distribution over possible boards, or every cell by mean squared error"""
    wm_hidden: Count = 128  # width of the hidden layers (the pixel head's are twice as wide)
    wm_channel_weights: tuple[float, ...] | None = None
    """pixel head: weight of each plane's error, for example 2 2 2 2 1 1 1 (None: all 1)"""
    num_updates: Count = 3000  # optimizer steps
    batch_size: Count = 256  # transitions per update and model, drawn with replacement
    learning_rate: Positive = 2e-3  # Adam's step size at the start; falls to 0 along a cosine


@dataclasses.dataclass
class Args(RunArgs, DataArgs, WorldModelArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {  # the boxes of --help
    "run": RunArgs,
    "game": StagHuntConfig,
    "data": DataArgs,
    "world_model": WorldModelArgs,
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
    pixel = args.wm_head == "pixel"
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.population_names(args.population)
    weights = args.wm_channel_weights
    if weights is not None:
        planes = config.observation_shape[0]
        negative = not all(0 <= weight < math.inf for weight in weights)
        refuse(not pixel, "--wm-channel-weights belongs to --wm-head pixel")
        refuse(len(weights) != planes, f"--wm-channel-weights needs {planes} numbers, one per plane")
        refuse(negative, "--wm-channel-weights must be numbers >= 0")
    refuse(config.num_cells > 255, f"--height, --width: a board has up to 255 cells, not {config.num_cells}")
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


class WorldModel(nn.Module):
    """The rules are local, and so is the network: who does what in the 3x3 cells around each
    player, and what is there, says where that player goes (one of 4 neighbours, stay, gone),
    whether the prey on its cell is taken and, for the observer, which payoff is paid. No weight
    belongs to a cell or a seat, so any board size will do. Players cannot jump, split, fade or
    leave where no prey stands, prey cannot appear, and the reward is one that exists."""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        self.gone = config.num_cells  # the number of the cell that is not on the board
        self.players = config.num_players
        row, column = np.divmod(np.arange(self.gone), config.width)
        row = row[:, None] + [-1, -1, -1, 0, 0, 0, 1, 1, 1]
        column = column[:, None] + [-1, 0, 1] * 3
        on_board = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
        around = np.where(on_board, row * config.width + column, self.gone)
        around = torch.tensor([*around.tolist(), [self.gone] * 9])  # [H*W + 1, 9]
        moves = torch.tensor([1, 7, 3, 5, 4])  # up, down, left, right, stay
        target = F.pad(around[:, moves], (0, 1), value=self.gone)  # gone
        near = torch.full((self.gone + 1, self.gone + 1), 9)  # where around a cell another is; 9: nowhere
        near.scatter_(1, around, torch.arange(9).expand_as(around))
        near[:, self.gone] = 9
        self.register_buffer("moves", moves, persistent=False)
        self.register_buffer("near", near, persistent=False)
        self.register_buffer("around", around, persistent=False)
        self.register_buffer("target", target, persistent=False)
        self.register_buffer("payoffs", torch.tensor(list(config.payoffs())), persistent=False)
        # Inputs: the player's own action; around it, how many do what (a sum: two hunters differ
        # from one); and the board.
        inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS + 4)
        stag, hare = NUM_ACTIONS, NUM_ACTIONS + 1
        prey = torch.tensor([stag] * config.num_stags + [hare] * config.num_hares)
        self.register_buffer("prey", prey, persistent=False)
        self.padding = -inputs % 8  # as in BoardEncoder
        self.trunk = mlp(inputs + self.padding, args.wm_hidden, args.wm_hidden, gain=math.sqrt(2))
        # One head per own action: a bystander is not mistaken for one of the party that it stands
        # among. And one payoff head per size of a hunting party: one for all would pay four
        # hunters, which are rare, as three.
        self.num_payoff_heads = HUNT_STAG + 2 * self.players
        self.outcome_head = Linear(args.wm_hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = Linear(args.wm_hidden, 1, 0.01)
        self.payoff_head = Linear(args.wm_hidden, self.num_payoff_heads * len(self.payoffs), 0.01)

    def forward(self, board, walls, joint):
        """board [M, n, N + P] and joint action [M, n, N] in the observer's ego order, walls [M, n,
        H*W] (or [M, n, 1]) -> logits of each player's outcome [M, n, N, 6], of the prey on its cell
        being taken [M, n, N], of the observer's payoff [M, n, payoffs]"""
        board = board.long()
        joint = joint.long()
        cell = board[..., : self.players]
        around = self.around[cell]  # [M, n, N, 9]
        walls = F.pad(walls.expand(-1, -1, self.gone), (0, 1), value=1)
        blocked = walls.gather(2, around.flatten(2)).view(around.shape)  # also off the board
        x = self.patches(board, around, blocked, joint)
        x = self.trunk(F.pad(x, (0, self.padding)).flatten(1, 2)).relu_()  # [M, n * N, hidden]
        outcome = self.outcome_head(x).unflatten(1, (-1, self.players))
        outcome = select_head(outcome, joint, NUM_ACTIONS).float()
        no_prey = ~self.on_prey(board).any(3, keepdim=True)  # nobody leaves from here
        impossible = torch.cat([blocked[..., self.moves] > 0, no_prey], 3)
        outcome = outcome.masked_fill(impossible, -1e9)
        taken = self.prey_head(x).view(cell.shape).float()
        payoff = self.payoff_head(x[:, :: self.players])  # the observer's
        payoff = select_head(payoff, self.payoff_case(cell, joint), self.num_payoff_heads).float()
        return outcome, taken, payoff

    def patches(self, board, around, blocked, joint):
        """What the network reads for each player [M, n, N, _]: its own action and, in the 3x3 cells
        around it, how many do what, prey, walls, and which of them are on the board"""
        acts = F.one_hot(joint, NUM_ACTIONS).to(blocked.dtype)  # [M, n, N, 7]
        kind = torch.cat([joint, self.prey.expand(*joint.shape[:2], -1)], 2)[:, :, None]
        near = self.near[board[..., : self.players, None], board[:, :, None]]  # [M, n, N, N + P]
        seen = blocked.new_zeros(*joint.shape, 10 * (NUM_ACTIONS + 2))
        seen = seen.scatter_add(3, 10 * kind + near, seen.new_ones(near.shape))
        seen = seen.unflatten(3, (-1, 10))[..., :9]
        on_board = (around < self.gone).to(blocked.dtype)
        return torch.cat([acts, seen.flatten(3), blocked * on_board, on_board], 3)

    def on_prey(self, board):
        """bool [M, n, N, P]: this player stands on this prey"""
        players = board[..., : self.players, None]
        prey = board[:, :, None, self.players :]
        return (players == prey) & (players < self.gone)

    def payoff_case(self, cell, joint):
        """Which payoff head [M, n]: by the observer's action and, if it hunts, by how many hunt with
        it"""
        action = joint[..., 0]
        party = ((cell == cell[..., :1]) & (joint == joint[..., :1])).sum(2)
        hunt = HUNT_STAG + (action - HUNT_STAG) * self.players + party - 1
        return torch.where(action >= HUNT_STAG, hunt, action)

    def loss(self, board, walls, joint, next_board, reward):
        """-> [M, n]"""
        outcome, taken, payoff = self(board, walls, joint)
        cell = board[..., : self.players]
        next_cell = next_board[..., : self.players]
        goes = (self.target[cell.long()] == next_cell[..., None]).byte().argmax(3)
        goes = torch.where(next_cell < self.gone, goes, 5)
        outcome_loss = -outcome.log_softmax(3).gather(3, goes[..., None])[..., 0]
        outcome_loss = outcome_loss * (cell < self.gone)
        on_prey = self.on_prey(board)
        lost = (on_prey & (next_board[:, :, None, self.players :] == self.gone)).any(3).float()
        taken_loss = F.binary_cross_entropy_with_logits(taken, lost, reduction="none")
        taken_loss = taken_loss * on_prey.any(3)
        paid = (reward[..., None] - self.payoffs).abs().argmin(2, keepdim=True)
        payoff_loss = -payoff.log_softmax(2).gather(2, paid)[..., 0]
        return (outcome_loss + taken_loss).sum(2) + payoff_loss

    def predict(self, board, walls, joint):
        """-> the most likely next board [M, n, N + P], reward [M, n]"""
        outcome, taken, payoff = self(board, walls, joint)
        target = self.target[board[..., : self.players].long()]  # from `gone` every way leads there
        players = target.gather(3, outcome.argmax(3, keepdim=True))[..., 0]
        lost = (self.on_prey(board) & (taken > 0)[..., None]).any(2)
        prey = torch.where(lost, self.gone, board[..., self.players :])
        return torch.cat([players, prey], 2).to(board.dtype), self.payoffs[payoff.argmax(2)]


def select_head(logits, head, num_heads: int):
    """[..., num_heads * outputs], int64 [...] -> [..., outputs]"""
    logits = logits.unflatten(-1, (num_heads, -1))
    index = head[..., None, None].expand(*head.shape, 1, logits.shape[-1])
    return logits.gather(-2, index).squeeze(-2)


class PixelWorldModel(nn.Module):
    """An MLP that predicts every cell of every plane and the reward by mean squared error"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        self.config = config
        planes = math.prod(config.observation_shape)
        hidden = 2 * args.wm_hidden
        weights = args.wm_channel_weights or [1.0] * config.observation_shape[0]
        self.register_buffer("channel_weights", torch.tensor(weights).view(-1, 1, 1), persistent=False)
        inputs = planes + (NUM_ACTIONS + 1) * config.num_players
        self.layers = mlp(inputs, hidden, hidden, hidden, planes + 1)

    def forward(self, planes, joint, seat):
        """planes [M, n, C, H, W] and joint action [M, n, N] in the observer's ego order, its seat
        [M, n] -> the next planes [M, n, C, H, W], its reward [M, n]"""
        acts = F.one_hot(joint.long(), NUM_ACTIONS).flatten(2)
        seat = F.one_hot(seat, self.config.num_players)
        x = self.layers(torch.cat([planes.flatten(2), acts, seat], 2).float())
        return x[..., :-1].view(planes.shape), x[..., -1]

    def loss(self, board, walls, joint, seat, next_board, reward):
        """-> [M, n]"""
        planes, paid = self(game.planes(self.config, board, walls), joint, seat)
        next_planes = game.planes(self.config, next_board, walls)
        squared = (planes - next_planes).square() * self.channel_weights
        return squared.mean((3, 4)).sum(2) + (paid - reward).square()


def make_world_model(args: Args, config: StagHuntConfig, seeds: list[int], device) -> Stacked:
    """One for each seed"""
    kind = WorldModel if args.wm_head == "structured" else PixelWorldModel
    return Stacked(lambda: kind(config, args), [1000 * seed for seed in seeds], device)


# ---- Data


class PlayedGames(NamedTuple):
    """G games of T steps, seen by each player; after a game's end comes its last board again, and
    `acted` is False."""

    board: torch.Tensor  # uint8 [G, T + 1, N, N + P]
    walls: torch.Tensor  # uint8 [G, H*W] (one 0 where the game has none)
    joint: torch.Tensor  # uint8 [G, T, N, N] ego order
    reward: torch.Tensor  # [G, T, N]
    acted: torch.Tensor  # bool [G, T, N] on the board before the step, and the game not over
    ended: torch.Tensor  # bool [G, T, N] the game is over after the step


def play_games(env: StagHuntEnv, population: str) -> PlayedGames:
    """One game in each place"""
    config = env.config
    seats = game.Seats(env, [["mixed"] * config.num_players], population=population)
    state = env.initial_state()
    boards = [env.cells(state)]
    steps = []
    for _ in range(config.final_time):
        actions = game.sample(seats.action_probs(state))
        state, reward, acted, done = env.transition(state, actions)
        joint = env.seats_to_ego(torch.where(acted, actions, STAY))
        boards.append(env.cells(state))
        steps.append(
            {
                "joint": joint.byte(),
                "reward": reward,
                "acted": acted,
                "ended": done[:, None].expand_as(acted),
            }
        )
    fields = tree_map(lambda *x: torch.stack(x, 1), *steps)
    walls = state.walls[:, : config.num_wall_cells]
    return PlayedGames(torch.stack(boards, 1), walls, **fields)


def collect_games(args: Args, config: StagHuntConfig, seed: int, device) -> tuple[PlayedGames, PlayedGames]:
    """-> to train on, at least --num-transitions transitions; --held-out-games others, to measure
    on"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, 256, device, seed)
    train = play_games(env, args.population)
    while int(train.acted.sum()) < args.num_transitions:
        more = play_games(env, args.population)
        train = tree_map(lambda *x: torch.cat(x), train, more)
    rounds = math.ceil(args.held_out_games / env.num_envs)
    held_out = [play_games(env, args.population) for _ in range(rounds)]
    return train, tree_map(lambda *x: torch.cat(x)[: args.held_out_games], *held_out)


class Dataset(NamedTuple):
    """n transitions of each seed, [S, n, ...]"""

    board: torch.Tensor  # uint8 [..., N + P]
    walls: torch.Tensor  # uint8 [..., H*W]
    joint: torch.Tensor  # uint8 [..., N]
    seat: torch.Tensor  # int64, the observer's: the pixel head reads it
    next_board: torch.Tensor  # uint8 [..., N + P]
    reward: torch.Tensor
    last_step: torch.Tensor  # bool: the clock runs out with the step
    ended: torch.Tensor  # bool: the game ended with the step


def make_dataset(games: list[PlayedGames], limit: int | None = None) -> Dataset:
    """Transitions of all players while they were on the board, as many of each seed, at most
    `limit`"""
    parts = []
    for played in games:
        acted = played.acted
        last_step = torch.zeros_like(acted)
        last_step[:, -1] = True
        transitions = Dataset(
            board=played.board[:, :-1],
            walls=played.walls[:, None, None].expand(*acted.shape, -1),
            joint=played.joint,
            seat=torch.arange(acted.shape[2], device=acted.device).expand_as(acted),
            next_board=played.board[:, 1:],
            reward=played.reward,
            last_step=last_step,
            ended=played.ended,
        )
        parts.append(Dataset(*(x[acted][:limit] for x in transitions)))
    count = min(len(part.board) for part in parts)
    parts = [tree_map(lambda x: x[:count], part) for part in parts]
    return tree_map(lambda *x: torch.stack(x), *parts)


def first_rows(data, count: int):
    """Of each seed, [S, n, ...]"""
    return tree_map(lambda x: x[:, :count], data)


# ---- Measuring. What is predicted is compared as planes, which a pixel head need not make a board.


class Prediction(NamedTuple):
    """S models, n transitions"""

    board: torch.Tensor  # uint8 [S, n, C, H, W] the planes of the most likely next board
    reward: torch.Tensor  # [S, n]
    planes: torch.Tensor  # float [S, n, C, H, W] the probabilities or values behind them


def expected_planes(config: StagHuntConfig, world: Stacked, board, walls, joint):
    """Of the structured head: how likely each cell of each plane is set, float [S, n, C, H, W]"""
    outcome, taken, _ = world(board, walls.float(), joint)
    cell = board[..., : config.num_players].long()
    target = world.network.target[cell]  # [S, n, N, 6] where each outcome leads
    nowhere = outcome.new_zeros(*cell.shape, config.num_cells + 1)
    players = nowhere.scatter(3, target, outcome.softmax(3))
    lost = nowhere.scatter(3, cell[..., None], taken.sigmoid()[..., None])
    lost = lost.amax(2, keepdim=True)
    before = game.planes(config, board, walls).flatten(3)
    _, walls, prey = before.split([config.num_players, 1, 2], 2)
    planes = torch.cat([players[..., :-1], walls, prey * (1 - lost[..., :-1])], 2)
    return planes.unflatten(3, (config.height, config.width))


def predict_planes(config: StagHuntConfig, world: Stacked, board, walls, joint, seat) -> Prediction:
    """board [S, n, N + P], walls [S, n, _], joint action [S, n, N], the observer's seat [S, n]"""
    if isinstance(world.network, PixelWorldModel):
        planes, reward = world(game.planes(config, board, walls), joint, seat)
        return Prediction((planes > 0.5).byte(), reward, planes)
    next_board, reward = world(board, walls.float(), joint, method="predict")
    planes = expected_planes(config, world, board, walls, joint)
    return Prediction(game.planes(config, next_board, walls), reward, planes)


@torch.no_grad()
def predict_all(config: StagHuntConfig, world: Stacked, data: Dataset, size: int = 2048) -> Prediction:
    parts = []
    for start in range(0, data.board.shape[1], size):
        rows = slice(start, start + size)
        step = data.board[:, rows], data.walls[:, rows], data.joint[:, rows], data.seat[:, rows]
        parts.append(predict_planes(config, world, *step))
    return tree_map(lambda *x: torch.cat(x, 1), *parts)


def roll_out(config: StagHuntConfig, world: Stacked, board, walls, joint, seat):
    """board [S, n, N + P], joint actions [S, k, n, N] -> planes [S, n, C, H, W] after k steps in
    which the model reads its own predictions"""
    if isinstance(world.network, PixelWorldModel):
        planes = game.planes(config, board, walls)
        for step_joint in joint.unbind(1):
            next_planes, _ = world(planes, step_joint, seat)
            planes = (next_planes > 0.5).byte()
        return planes
    for step_joint in joint.unbind(1):
        board, _ = world(board, walls.float(), step_joint, method="predict")
    return game.planes(config, board, walls)


def is_possible(config: StagHuntConfig, board, next_board, reward) -> torch.Tensor:
    """bool [...] of planes [..., C, H, W]: is each player within one step, or gone from a cell with
    prey, no prey new, no wall moved, the reward one that the game pays? Whether these fit together
    is not asked; exact_match asks it."""
    kinds = [config.num_players, 1, 2]
    players, walls, prey = board.float().split(kinds, -3)
    next_players, next_walls, next_prey = next_board.float().split(kinds, -3)
    padded = F.pad(players, (1, 1, 1, 1))
    corners = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))  # stay, and the four moves
    reach = sum(padded[..., top : top + config.height, left : left + config.width] for top, left in corners)
    reached = (next_players <= reach * (1 - walls)).flatten(-3).all(-1)
    cells_each = next_players.sum((-2, -1))
    single = (cells_each <= 1).all(-1)
    gone = (players.sum((-2, -1)) > 0) & (cells_each == 0)
    on_prey = (players * prey.amax(-3, keepdim=True)).sum((-2, -1)) > 0
    left_prey = (on_prey | ~gone).all(-1)
    same_walls = (next_walls == walls).flatten(-3).all(-1)
    no_new_prey = (next_prey <= prey).flatten(-3).all(-1)
    payoffs = torch.tensor(list(config.payoffs()), device=board.device)
    paid = (reward[..., None] - payoffs).abs().amin(-1) < 1e-4
    return reached & single & left_prey & same_walls & no_new_prey & paid


def reward_event(config: StagHuntConfig, reward) -> torch.Tensor:
    """int [...]: which of EVENTS the nearest payoff belongs to"""
    payoffs = config.payoffs()
    values = torch.tensor(list(payoffs), device=reward.device)
    events = torch.tensor([EVENTS.index(kind) for kind in payoffs.values()], device=reward.device)
    nearest = (reward[..., None] - values).abs().argmin(-1)
    return events[nearest]


def one_step_metrics(config: StagHuntConfig, data: Dataset, predicted: Prediction):
    """-> metrics that are logged, others only for the table, dicts of [S]"""
    board = game.planes(config, data.board, data.walls)
    next_board = game.planes(config, data.next_board, data.walls)
    per_channel = (predicted.planes - next_board).square().mean((1, 3, 4))  # [S, C]
    mse = per_channel.mean(1)
    players = predicted.board[:, :, : config.num_players].flatten(2)
    ended = (players.amax(2) == 0) | data.last_step
    exact = (predicted.board == next_board).flatten(2).all(2)
    possible = is_possible(config, board, predicted.board, predicted.reward)
    metrics = {
        "exact_match": exact.float().mean(1),
        "obs_mse": mse,
        "obs_psnr": -10 * mse.clamp(min=1e-20).log10(),
        "reward_mse": (predicted.reward - data.reward).square().mean(1),
        "end_accuracy": (ended == data.ended).float().mean(1),
        "possible_boards": possible.float().mean(1),
    }
    details = {f"per_channel_mse/{channel}": x for channel, x in enumerate(per_channel.unbind(1))}
    event = reward_event(config, predicted.reward)
    true_event = reward_event(config, data.reward)
    for number, name in enumerate(EVENTS):
        hits = ((event == number) & (true_event == number)).sum(1)
        metrics[f"reward_recall/{name}"] = hits / (true_event == number).sum(1)
        details[f"reward_precision/{name}"] = hits / (event == number).sum(1)
    return metrics, details


@torch.no_grad()
def steps_ahead(config: StagHuntConfig, world: Stacked, games: list[PlayedGames], limit: int = 2000):
    """exact_match/k [S]: exact boards after k steps of the model on its own boards, given the
    actions that were played. One list entry per seed; only rollouts in which the observer is on the
    board until the last step."""
    metrics = {}
    for k in STEPS_AHEAD:
        starts = [played.acted[:, k - 1 :].nonzero() for played in games]  # (game, t, observer)
        count = min(limit, *(len(start) for start in starts))
        if count == 0:
            continue
        parts = []
        for played, start in zip(games, starts, strict=True):
            rows = torch.linspace(0, len(start) - 1, count, device=start.device).long()
            number, t, observer = start[rows].unbind(1)
            step = t + torch.arange(k, device=start.device)[:, None]  # [k, count]
            parts.append(
                {
                    "board": played.board[number, t, observer],
                    "walls": played.walls[number],
                    "joint": played.joint[number, step, observer],
                    "seat": observer,
                    "last_board": played.board[number, t + k, observer],
                }
            )
        part = tree_map(lambda *x: torch.stack(x), *parts)
        last_board = game.planes(config, part.pop("last_board"), part["walls"])
        exact = (roll_out(config, world, **part) == last_board).flatten(2).all(2)
        metrics[f"exact_match/{k}"] = exact.float().mean(1)
    return metrics


def seed_rows(metrics: dict[str, torch.Tensor], num_seeds: int) -> list[dict[str, float]]:
    """Each [S] -> one dict of floats per seed"""
    return [{name: float(x[seed]) for name, x in metrics.items()} for seed in range(num_seeds)]


def measure(config: StagHuntConfig, world: Stacked, held_out: Dataset) -> list[dict[str, float]]:
    """The metrics that are logged while it trains, of each seed"""
    metrics, _ = one_step_metrics(config, held_out, predict_all(config, world, held_out))
    return seed_rows(metrics, len(world))


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


def write_table(path: Path, rows: list[dict[str, float]], seeds: list[int]) -> None:
    """A CSV with one line per metric; printed too"""
    lines = [["metric", "mean", "half_width_95", *(f"seed_{seed}" for seed in seeds)]]
    for name in rows[0]:
        values = [row[name] for row in rows]
        mean, half = interval(values)
        lines.append([name, mean, half, *values])
        print(f"{name:<28}{mean:>14.6g} ± {half:.2g}".replace(" ± nan", ""))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)


def draw_cases(config: StagHuntConfig, data: Dataset, predicted: Prediction, cases: list[int]) -> Figure:
    """One seed's data and predictions [n, ...]. Each case is a row: the board, the true next one,
    the predicted one with the numbers behind it"""
    height = 0.7 + 3.6 * config.height / config.width
    figure = Figure((12, len(cases) * height), layout="tight")
    axes = figure.subplots(len(cases), 3, squeeze=False)
    for row, case in zip(axes, cases, strict=True):
        board = game.planes(config, data.board[case], data.walls[case]).cpu()
        truth = game.planes(config, data.next_board[case], data.walls[case]).cpu()
        planes = predicted.planes[case].cpu()
        error = float((planes - truth).abs().max())
        acts = []
        for player, action in enumerate(data.joint[case].tolist()):
            if board[player].any():
                acts.append(f"{player} {game.ACTION_NAMES[action]}")
        lines = [", ".join(acts[first : first + 4]) for first in range(0, len(acts), 4)]
        titles = (
            "\n".join(lines),
            f"true next, reward {float(data.reward[case]):.3g}",
            f"predicted, reward {float(predicted.reward[case]):.3g}, error {error:.2g}",
        )
        shown = ((board, board), (truth, truth), (predicted.board[case].cpu(), planes))
        for axis, title, (image, values) in zip(row, titles, shown, strict=True):
            axis.imshow(game.render_planes(config, image, values))
            axis.set_title(title, fontsize=9)
            axis.axis("off")
    return figure


def draw_calibration(config: StagHuntConfig, data: Dataset, predicted: Prediction) -> Figure:
    """The predicted values of the cells, by what is truly there"""
    names = [*(f"player {number}" for number in range(config.num_players)), "walls", "stags", "hares"]
    figure = Figure((13, 5.5), layout="tight")
    axes = figure.subplots(2, math.ceil(len(names) / 2), squeeze=False)
    next_board = game.planes(config, data.next_board[:2000], data.walls[:2000])
    for channel, (axis, name) in enumerate(zip(axes.flat, names, strict=False)):
        values = predicted.planes[:2000, channel].flatten().cpu().numpy()
        truth = next_board[:, channel].flatten().cpu().numpy()
        edges = np.linspace(min(-0.05, values.min()), max(1.05, values.max()), 41)
        axis.hist(
            [values[truth == 0], values[truth == 1]],
            edges,
            label=["truly 0", "truly 1"],
            color=["#9aa5b1", "#d64541"],
            log=True,
        )
        axis.set_title(name, fontsize=9)
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.suptitle("predicted value of a cell: counts")
    return figure


def draw_steps_ahead(metrics: dict[str, float]) -> Figure:
    figure = Figure((5, 3.2), layout="tight")
    axis = figure.subplots()
    ahead = [k for k in STEPS_AHEAD if f"exact_match/{k}" in metrics]
    axis.plot(ahead, [metrics[f"exact_match/{k}"] for k in ahead], marker="o")
    axis.set(xlabel="steps on the model's own boards", ylabel="boards exactly right", ylim=(0, 1.02))
    return figure


def draw_pictures(config, world, held_out: Dataset, rows: list[dict], folders: list[Path], writers, step) -> None:
    """Each seed's model on some transitions: its worst cases, a summary"""
    data = first_rows(held_out, DRAWN_TRANSITIONS)
    predicted = predict_all(config, world, data)
    next_board = game.planes(config, data.next_board, data.walls)
    plane_error = (predicted.planes - next_board).square().flatten(2).sum(2)
    error = plane_error + (predicted.reward - data.reward).abs()  # [S, n]
    worst = error.argsort(1, descending=True)[:, :4].tolist()
    for seed, folder in enumerate(folders):
        seed_data = Dataset(*(x[seed] for x in data))
        seed_predicted = Prediction(*(x[seed] for x in predicted))
        figures = {
            "cases_worst": draw_cases(config, seed_data, seed_predicted, worst[seed]),
            "calibration_histogram": draw_calibration(config, seed_data, seed_predicted),
            "steps_ahead": draw_steps_ahead(rows[seed]),
        }
        for name, figure in figures.items():
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=70)
            if writers:
                image = np.array(Image.open(path).convert("RGB"))
                writers[seed].add_image(name, image, step, dataformats="HWC")


def report(args: Args, config, world: Stacked, games: list[PlayedGames], held_out: Dataset, folders, writers, step):
    """The full measurement: printed, written as CSV, drawn; the metrics that are logged go to
    TensorBoard too. -> all final metrics per seed"""
    metrics, details = one_step_metrics(config, held_out, predict_all(config, world, held_out))
    metrics |= steps_ahead(config, world, games)
    rows = seed_rows({**metrics, **details}, len(world))
    print(f"{args.wm_head} head, {config.setting}, {len(rows)} seed(s), held-out games; CSV and pictures: {folders[0]}")
    write_table(folders[0] / "evaluation.csv", rows, run_seeds(args))
    with game.never_fatal("write to TensorBoard"):
        for writer, row in zip(writers, rows, strict=False):
            for name in metrics:
                writer.add_scalar(f"wm_final/{name}", row[name], step)
    with game.never_fatal("draw"):
        draw_pictures(config, world, held_out, rows, folders, writers, step)
    return rows


def mean_over_seeds(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: interval([row[name] for row in rows])[0] for name in rows[0]}


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


def train(args: Args, world: Stacked, optimizer, data: Dataset, first: int, last: int) -> torch.Tensor:
    """Updates `first` to `last` on data [S, n, ...] -> their mean loss [S]"""
    torch.manual_seed(1_000_003 * args.seed + first)  # so a resumed run goes on with the same numbers
    num_seeds, size = data.board.shape[:2]
    device = data.board.device
    seed = torch.arange(num_seeds, device=device)[:, None]
    total = torch.zeros(num_seeds, device=device)
    for update in range(first, last):
        angle = math.pi * update / args.num_updates
        optimizer.param_groups[0]["lr"] = args.learning_rate * 0.5 * (1 + math.cos(angle))
        index = torch.randint(size, (num_seeds, args.batch_size), device=device)
        batch = tree_map(lambda x, index=index: x[seed, index], data)
        step = [batch.board, batch.walls.float(), batch.joint]
        if args.wm_head == "pixel":
            step.append(batch.seat)
        loss = world(*step, batch.next_board, batch.reward, method="loss").mean(1)
        optimizer_step(optimizer, loss, 1.0)
        total += loss.detach()
    return total / (last - first)


def log_rows(loss: list[float], measured: list[dict], learning_rate: float) -> list[dict]:
    """A row of metrics per seed"""
    rows = []
    for seed_loss, metrics in zip(loss, measured, strict=True):
        row = {"losses/world_model": seed_loss}
        row |= {f"wm/{name}": value for name, value in metrics.items()}
        row["charts/learning_rate"] = learning_rate
        rows.append(row)
    return rows


# ---- Main


def run_seeds(args: Args) -> list[int]:
    return list(range(args.seed, args.seed + args.num_seeds))


def resume_run(args: Args, device: torch.device) -> tuple[Args, dict]:
    """-> the flags with the path of the checkpoint, the checkpoint"""
    args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
    checkpoint = game.load_checkpoint(args.resume, FORMAT)
    game.check_resume(args, load_args(args.resume, checkpoint["args"]), MAY_CHANGE)
    kind = checkpoint["device"]
    start = f"--resume {args.resume} is a run on {kind}"
    refuse(kind != device.type, f"{start}: it cannot go on on {device.type}")
    update = checkpoint["step"]
    refuse(update > args.num_updates, f"--num-updates {args.num_updates}: the run has {update} already")
    return args, checkpoint


def save_run(run: game.Run, args: Args, world: Stacked, optimizer, update: int, seconds: float) -> None:
    board = ("height", "width") if args.wm_head == "pixel" else ()
    must_match = {"world_model": type(world.network).__name__, "wm_hidden": args.wm_hidden}
    for name in (*RULES_MUST_MATCH, *board):
        must_match[name] = getattr(args.config, name)
    content = {
        "format": FORMAT,
        "args": dataclasses.asdict(args),
        "device": world.parameters()[0].device.type,
        "step": update,
        "must_match": must_match,  # where it is loaded
        "networks": {"world": world.state_dict()},
        "optimizer": optimizer.state_dict(),
        "seconds": seconds,
    }
    run.save(content)


def main(args: Args) -> dict[str, float]:
    """Returns the final metrics, averaged over seeds."""
    started = time.monotonic()
    config = validate(args)
    device = game.resolve_device(args.device)
    checkpoint = None
    update = 0
    if args.resume is None:
        game.check_run_flags(args)
    else:
        args, checkpoint = resume_run(args, device)
        update = checkpoint["step"]
        started -= checkpoint["seconds"]
    seeds = run_seeds(args)
    collected = [collect_games(args, config, seed, device) for seed in seeds]
    data = make_dataset([games for games, _ in collected], args.num_transitions)
    held_out_games = [games for _, games in collected]
    held_out = make_dataset(held_out_games)
    world = make_world_model(args, config, seeds, device)
    optimizer = torch.optim.Adam(world.parameters(), args.learning_rate, fused=True)
    if checkpoint:
        world.load_state_dict(checkpoint["networks"]["world"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    unfinished = update < args.num_updates
    run = game.Run(args, f"{config.setting}_{args.wm_head}", checkpoint, update)
    path = run.folders[0] / "checkpoint.pt"
    with contextlib.closing(run), game.stop_requests() as stop:
        what = f"{config.setting}, {args.wm_head} head, {len(world)} model(s), on {device}"
        print(f"{what}; run folder {run.folders[0]}", flush=True)
        watched = sum(int(games.acted.any(2).sum()) for games, _ in collected) / len(collected)
        print(f"to learn from, in each seed: {watched:.0f} env steps")
        with tqdm(initial=update, total=args.num_updates, unit="update", mininterval=1) as bar:
            while update < args.num_updates and not stop:
                last = min(update + args.log_every, args.num_updates)
                loss = train(args, world, optimizer, data, update, last).tolist()
                update = last
                measured = measure(config, world, first_rows(held_out, MEASURED_TRANSITIONS))
                rows = log_rows(loss, measured, optimizer.param_groups[0]["lr"])
                run.log(update, rows)
                seconds = time.monotonic() - started
                if not np.isfinite(loss).all():
                    raise FloatingPointError(f"losses/world_model is {loss} (update {update})")
                exact = np.mean([row["wm/exact_match"] for row in rows])
                bar.set_postfix_str(f"loss {np.mean(loss):.4g}, exact match {exact:.4%}")
                bar.update(update - bar.n)
                save_run(run, args, world, optimizer, update, seconds)
        if update < args.num_updates:
            print(f"stopped; go on with: {shlex.join(['python', sys.argv[0], '--resume', str(path)])}")
            raise SystemExit(128 + stop[0])
        writers = run.writers if unfinished else []
        final = report(args, config, world, held_out_games, held_out, run.folders, writers, update)
    print(f"{time.monotonic() - started:.1f} s in all; checkpoint {path}")
    return {"checkpoint": str(path), **mean_over_seeds(final)}


if __name__ == "__main__":
    game.command_line(parse_args, main)
