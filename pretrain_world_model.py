"""Pretrains the world model on games of rule-based players, and measures it like a simulator.

    python pretrain_world_model.py                                    # structured head, 4x4, 50 000 transitions
    python pretrain_world_model.py --wm-head pixel                    # the per-pixel MSE head, for comparison
    python pretrain_world_model.py --num-seeds 5 --height 8 --width 8
    python pretrain_world_model.py --evaluate runs/RUN/checkpoint.pt --evaluate-board 6x9
    python pretrain_world_model.py --resume runs/RUN/checkpoint.pt
    python hopplus_ppo.py --world-model-checkpoint runs/RUN/checkpoint.pt

A transition is one player's view of one step: (its planes, the joint action in its ego order) -> (its planes one step
later, its own reward). `docs/pretrain_world_model.md` explains every figure this script prints.

Axes: S seeds, one model each, G games, T steps, N seats, C planes, H W board, n rows of any kind.
"""

import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import HUNT_STAG, NUM_ACTIONS, STAY, Count, Positive, StagHuntConfig, StagHuntEnv, Whole

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats
from torch import nn
from torch.func import stack_module_state, vmap
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "pretrain_world_model.py 8"  # of a checkpoint
KEYS = {  # in it
    "args": dict,
    "device": str,
    "step": int,
    "networks": dict,
    "optimizer": dict,
    "seconds": float,
    "folders": list,
    "must_match": dict,
}
MAY_CHANGE = ("num_updates", "log_every", "log_details", "run_dir", "device", "resume")
STEPS_AHEAD = (1, 3, 5, 10, 20)
EVENTS = ("none", "hare", "stag")
DETAILS = re.compile("wm/(per_channel_mse|reward_precision)/")  # logged only with --log-details


@dataclasses.dataclass
class RunArgs:
    exp_name: str = Path(__file__).stem
    """first part of the run's name"""
    seed: Whole = 1
    """seed of the first experiment; the others count up from it, but are not what --seed 2, 3, ... alone would be"""
    num_seeds: Count = 1
    """S, experiments side by side, each with its own games, weights and TensorBoard run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    resume: str | None = None
    """continue the run of this checkpoint or run folder, bit for bit, with its flags; more --num-updates extend it,
    --log-every may change too"""
    log_every: Count = 200
    """updates between two measurements, which are also checkpoints"""
    log_details: bool = False
    """log every metric, not only the main ones"""
    evaluate: str | None = None
    """only measure this checkpoint: tables and pictures beside it; the other flags come from it"""
    evaluate_board: str | None = None
    """--evaluate: on a board of this size, for example 6x9 (structured head only)"""


@dataclasses.dataclass
class DataArgs:
    population: str = ",".join(game.POPULATION)
    """who plays the games: each seat of each game draws one of these"""
    num_transitions: Count = 50_000
    """transitions to train on"""
    held_out_games: Count = 1000
    """further games to measure on"""


@dataclasses.dataclass
class WorldModelArgs:
    wm_head: Literal["structured", "pixel"] = "structured"
    """a distribution over possible boards, or every cell by mean squared error"""
    wm_hidden: Count = 128
    """width of the hidden layers (the pixel head's are twice as wide)"""
    wm_channel_weights: tuple[float, ...] | None = None
    """pixel head: weight of each plane's error, for example 2 2 2 2 1 1 1 (None: all 1)"""
    num_updates: Count = 3000
    """optimizer steps"""
    batch_size: Count = 256
    """transitions per update and model, drawn with replacement"""
    learning_rate: Positive = 2e-3
    """Adam's step size at the start; falls to 0 along a cosine"""


@dataclasses.dataclass
class Args(RunArgs, DataArgs, WorldModelArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"run": RunArgs, "game": StagHuntConfig, "data": DataArgs, "world_model": WorldModelArgs}


def make_args(**changes) -> Args:
    """Complete flags; with `resume` those of the run that goes on"""
    if changes.get("resume") is None:
        return Args(**changes)
    path = game.find_checkpoint(changes["resume"], "--resume")
    return load_args(path, load_checkpoint(path)["args"], **changes)


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, GROUPS, make_args(**game.early_flags(words, resume=None, device="auto")), words)


def parse_board(board: str) -> tuple[int, int]:
    height, cross, width = board.partition("x")
    right = cross and height.isdecimal() and width.isdecimal()
    game.refuse(not right, f"--evaluate-board is written HEIGHTxWIDTH, for example 4x4, not {board!r}")
    return int(height), int(width)


def validate(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config, refuse = args.config, game.refuse
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.population_names(args.population)
    pixel, board = args.wm_head == "pixel", args.evaluate_board
    weights, planes = args.wm_channel_weights, config.observation_shape[0]
    refuse(config.prosocial and not pixel, "--prosocial rewards depend on the whole board: --wm-head pixel")
    if weights is not None:
        refuse(not pixel, "--wm-channel-weights belongs to --wm-head pixel")
        refuse(len(weights) != planes, f"--wm-channel-weights needs {planes} numbers, one per plane")
        refuse(not all(0 <= w < math.inf for w in weights), "--wm-channel-weights must be numbers >= 0")
    refuse(board and not args.evaluate, "--evaluate-board belongs to --evaluate")
    refuse(board and pixel, f"--evaluate-board: the pixel head knows one size, {config.height}x{config.width}")
    refuse(args.evaluate and args.resume, "--evaluate and --resume exclude each other")
    if board:
        height, width = parse_board(board)
        try:
            config = dataclasses.replace(config, height=height, width=width)
        except game.UserError as error:
            raise game.UserError(f"--evaluate-board {board}: {error}") from error
    return config


def memory_needs(args: Args) -> dict[str, int]:
    """Flags -> bytes that they ask for, roughly"""
    config, hidden, seeds = args.config, args.wm_hidden, args.num_seeds
    planes, players = math.prod(config.observation_shape), config.num_players
    needs = {"--num-transitions": seeds * args.num_transitions * 6 * planes}
    needs["--held-out-games"] = seeds * args.held_out_games * players * config.final_time * 4 * planes
    needs["--height, --width"] = 8 * config.num_cells**2
    needs["--wm-hidden"] = 64 * seeds * hidden * (150 + planes + hidden)
    needs["--batch-size"] = seeds * args.batch_size * players * 16 * (150 + hidden)
    return {f"{flag}, --num-seeds" if seeds > 1 else flag: size for flag, size in needs.items()}


# ---- Networks, each for one learner and n rows. A row never looks at another, so Stacked may split a batch.


def layer(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Uniform weights of variance gain^2 / inputs, no bias at the start"""
    linear = nn.Linear(inputs, outputs)
    nn.init.uniform_(linear.weight, -gain * math.sqrt(3 / inputs), gain * math.sqrt(3 / inputs))
    nn.init.zeros_(linear.bias)
    return linear


def mlp(*sizes: int, gain: float = 1.0) -> nn.Sequential:
    """Layers with ReLU between them; gain is the last one's"""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [layer(inputs, outputs, math.sqrt(2)), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, layer(sizes[-2], sizes[-1], gain))


class Stacked:
    """M networks of one kind, called in one operation: inputs [M, n, ...] -> outputs [M, n, ...], in float32. Inside,
    `dtype` holds where no gradient is asked for, `train_dtype` where one is."""

    def __init__(self, make, seeds: list[int], device, dtype=torch.float32, train_dtype=torch.float32):
        networks = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                networks.append(make())
        stacked, _ = stack_module_state(networks)
        self.network = networks[0].to(device)  # its buffers serve all
        self.params, self.places = {}, []
        for name, p in stacked.items():
            if name.endswith("weight") and p.dim() == 3:  # of nn.Linear, which reads the transpose: slow on ARM
                p = p.mT.contiguous().mT
            self.params[name] = nn.Parameter(p.detach().to(device))
            path, _, leaf = name.rpartition(".")
            owner = self.network.get_submodule(path)._parameters
            self.places.append((owner, leaf, owner[leaf]))
        self.dtype = dtype
        self.train_dtype = train_dtype

    def __call__(self, *inputs: torch.Tensor, method: str = "forward"):
        dtype = self.train_dtype if torch.is_grad_enabled() else self.dtype
        m, n = inputs[0].shape[:2]
        params = [p.to(dtype) for p in self.params.values()]
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        # On a GPU a long batch is split: as one long sum per learner, a weight's gradient leaves most of it idle.
        parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1) if inputs[0].is_cuda else 1
        if parts > 1:
            params = [p.repeat_interleave(parts, 0) for p in params]
            inputs = [x.reshape(m * parts, n // parts, *x.shape[2:]) for x in inputs]
        outputs = vmap(lambda *x: self.call_one(method, *x))(params, *inputs)
        return tree_map(lambda x: (x.float() if x.is_floating_point() else x).reshape(m, n, *x.shape[2:]), outputs)

    def call_one(self, method: str, params: list, *inputs):
        """One learner. As torch.func.functional_call, in half the time, and for any method."""
        for (owner, name, _), p in zip(self.places, params, strict=True):
            owner[name] = p
        outputs = getattr(self.network, method)(*inputs)
        for owner, name, own in self.places:
            owner[name] = own
        return outputs

    def __len__(self) -> int:
        return len(self.parameters()[0])

    def parameters(self) -> list[nn.Parameter]:
        return list(self.params.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.params.items()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        game.copy_nested_(self.state_dict(), saved)


class WorldModel(nn.Module):
    """The rules are local, and so is the network: everyone's action is painted on its cell, and the 3x3 cells around
    each player say where that player goes (one of 4 neighbours, stay, gone), whether the prey on its cell is taken and,
    for the observer, which payoff is paid. No weight belongs to a cell or a seat, so any board size will do. Players
    cannot jump, split, fade or leave where no prey stands, prey cannot appear, and the reward is one that exists."""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        row, column = np.divmod(np.arange(config.num_cells), config.width)
        row, column = row[:, None] + [-1, -1, -1, 0, 0, 0, 1, 1, 1], column[:, None] + [-1, 0, 1] * 3
        on_board = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
        around = np.where(on_board, row * config.width + column, config.num_cells)  # cell number H*W: off the board
        self.register_buffer("around", torch.from_numpy(around), persistent=False)  # [H*W, 9]
        self.register_buffer("target", self.around[:, [1, 7, 3, 5, 4]], persistent=False)  # up, down, left, right, stay
        self.register_buffer("payoffs", torch.tensor(list(config.payoffs())), persistent=False)
        self.num_players, self.by_name = config.num_players, config.strengths is not None
        # The player's own action; around it, how many do what (a sum: two hunters differ from one), or, where players
        # differ in strength, who does, and how strong each is; and the board.
        inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS + 4)
        if self.by_name:
            inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS * config.num_players + 4) + config.num_players
            seat = torch.arange(config.num_players)
            strengths = torch.tensor(config.strengths, dtype=torch.float32)[(seat[:, None] + seat) % config.num_players]
            self.register_buffer("strengths", strengths / strengths.mean(), persistent=False)  # [seat, N] in ego order
        self.padding = -inputs % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        self.trunk = mlp(inputs + self.padding, args.wm_hidden, args.wm_hidden, gain=math.sqrt(2))
        # One head per own action: a bystander is not mistaken for one of the party that it stands among. And one payoff
        # head per size of a hunting party: one head for all would pay four hunters, which are rare, as three.
        self.outcome_head = layer(args.wm_hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = layer(args.wm_hidden, 1, 0.01)
        self.num_payoff_heads = HUNT_STAG + 2 * config.num_players
        self.payoff_head = layer(args.wm_hidden, self.num_payoff_heads * len(self.payoffs), 0.01)

    def read(self, board):
        """uint8 [n, C, H, W] -> planes [n, C, H*W], cell [n, N], present [n, N]"""
        planes = board.flatten(2)
        players = planes[:, : self.num_players]
        return planes, players.argmax(2), players.amax(2) > 0

    def forward(self, board, joint, seat):
        """board uint8 [n, C, H, W] and joint action [n, N], both in the observer's ego order, the observer's seat [n]
        -> logits of each player's outcome [n, N, 6], of the prey on its cell being taken [n, N], of the observer's
        payoff [n, R]"""
        planes, cell, present = self.read(board)
        n, seen = self.num_players, planes.to(self.prey_head.weight.dtype)
        own = F.one_hot(joint.long(), NUM_ACTIONS).to(seen.dtype)
        painted = own.mT @ seen[:, :n]  # [n, 7, H*W]
        if self.by_name:
            painted = (own[..., None] * seen[:, :n, None]).flatten(1, 2)  # [n, N * 7, H*W]
        painted = F.pad(torch.cat([painted, seen[:, n:], torch.ones_like(seen[:, :1])], 1), (0, 1))  # off the board: 0
        around = self.around[cell].flatten(1)[:, None].expand(-1, painted.shape[1], -1)  # [n, _, N * 9]
        patch = painted.gather(2, around).unflatten(2, (n, 9)).transpose(1, 2).flatten(2)
        inputs = [own, patch]
        if self.by_name:
            inputs.append(self.strengths[seat.long()][:, None].expand(-1, n, -1).to(seen.dtype))
        x = F.pad(torch.cat(inputs, 2), (0, self.padding))
        x = self.trunk(x).relu_()  # [n, N, hidden]
        walls = F.pad(planes[:, n], (0, 1), value=1)
        blocked = walls.gather(1, self.target[cell].flatten(1)).view(*cell.shape, 5) > 0
        no_prey = planes[:, -2:].amax(1).gather(1, cell) == 0  # nobody leaves from here
        outcome = self.select_head(self.outcome_head(x), joint.long(), NUM_ACTIONS).float()
        outcome = outcome.masked_fill(torch.cat([blocked, no_prey[..., None]], 2), -1e9)
        action = joint[:, 0].long()
        party = ((cell == cell[:, :1]) & (joint == joint[:, :1]) & present).sum(1).clamp(min=1)
        hunt_head = HUNT_STAG + (action - HUNT_STAG) * n + party - 1
        payoff_head = torch.where(action >= HUNT_STAG, hunt_head, action)
        payoff = self.select_head(self.payoff_head(x[:, 0]), payoff_head, self.num_payoff_heads)
        return outcome, self.prey_head(x).squeeze(2).float(), payoff.float()

    @staticmethod
    def select_head(logits, head, num_heads: int):
        """[..., num_heads * outputs], int64 [...] -> [..., outputs]"""
        logits = logits.unflatten(-1, (num_heads, -1))
        index = head[..., None, None].expand(*head.shape, 1, logits.shape[-1])
        return logits.gather(-2, index).squeeze(-2)

    def loss(self, board, joint, seat, next_board, reward):
        """-> [n]"""
        outcome, taken, payoff = self(board, joint, seat)
        planes, cell, present = self.read(board)
        next_planes, next_cell, next_present = self.read(next_board)
        goes = (self.target[cell] == next_cell[..., None]).byte().argmax(2)
        goes = torch.where(next_present, goes, 5)
        prey, next_prey = (p[:, -2:].amax(1).gather(1, cell).float() for p in (planes, next_planes))
        outcome_loss = -outcome.log_softmax(2).gather(2, goes[..., None])[..., 0] * present
        taken_loss = F.binary_cross_entropy_with_logits(taken, prey - next_prey, reduction="none") * prey * present
        paid = (reward[:, None] - self.payoffs).abs().argmin(1, keepdim=True)
        return (outcome_loss + taken_loss).sum(1) - payoff.log_softmax(1).gather(1, paid)[:, 0]

    def predict(self, board, joint, seat):
        """-> the most likely next board uint8 [n, C, H, W], reward [n]"""
        outcome, taken, payoff = self(board, joint, seat)
        certain = torch.zeros_like(outcome).scatter(2, outcome.argmax(2, keepdim=True), 1.0)
        return self.paint(board, certain, (taken > 0).float()).to(torch.uint8), self.payoffs[payoff.argmax(1)]

    def expected_planes(self, board, joint, seat):
        """-> float [n, C, H, W]: the probabilities behind the prediction"""
        outcome, taken, _ = self(board, joint, seat)
        return self.paint(board, outcome.softmax(2), taken.sigmoid())

    def paint(self, board, outcome, taken):
        """Probabilities of each player's outcome [n, N, 6] and of the prey on its cell being taken [n, N] -> planes"""
        planes, cell, present = self.read(board)
        target = F.pad(self.target[cell], (0, 1), value=planes.shape[2])  # [n, N, 6] where each outcome leads
        nowhere = torch.zeros_like(outcome[..., :1]).expand(-1, -1, planes.shape[2] + 1)
        players = nowhere.scatter(2, target, outcome * present[..., None])
        lost = nowhere.scatter(2, cell[..., None], (taken * present)[..., None]).amax(1, keepdim=True)
        prey = planes[:, -2:] * (1 - lost[..., :-1])
        return torch.cat([players[..., :-1], planes[:, self.num_players, None], prey], 1).view(board.shape)


class PixelWorldModel(nn.Module):
    """An MLP that predicts every cell of every plane and the reward by mean squared error"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        planes, hidden = math.prod(config.observation_shape), 2 * args.wm_hidden
        weights = torch.tensor(args.wm_channel_weights or [1.0] * config.observation_shape[0]).view(-1, 1, 1)
        self.register_buffer("channel_weights", weights, persistent=False)
        self.num_players = config.num_players
        self.layers = mlp(planes + (NUM_ACTIONS + 1) * config.num_players, hidden, hidden, hidden, planes + 1)

    def forward(self, board, joint, seat):
        acts = F.one_hot(joint.long(), NUM_ACTIONS).flatten(1)
        seat = F.one_hot(seat.long(), self.num_players)  # whose strength is whose
        x = self.layers(torch.cat([board.flatten(1), acts, seat], 1).to(self.layers[0].weight.dtype))
        return x[:, :-1].view(board.shape), x[:, -1]

    def loss(self, board, joint, seat, next_board, reward):
        planes, paid = self(board, joint, seat)
        squared = (planes - next_board).square() * self.channel_weights
        return squared.mean((2, 3)).sum(1) + (paid - reward).square()

    def predict(self, board, joint, seat):
        planes, paid = self(board, joint, seat)
        return (planes > 0.5).to(torch.uint8), paid

    def expected_planes(self, board, joint, seat):
        return self(board, joint, seat)[0]


def make_world_model(args: Args, config: StagHuntConfig, seeds: list[int], device) -> Stacked:
    """One for each seed"""
    kind = WorldModel if args.wm_head == "structured" else PixelWorldModel
    return Stacked(lambda: kind(config, args), [1000 * seed for seed in seeds], device)


# ---- Data


class Games(NamedTuple):
    """G games of T steps, seen by each player; after a game's end comes its last board again, and `acted` is False."""

    boards: torch.Tensor  # uint8 [G, T + 1, N, C, H, W]
    joint: torch.Tensor  # uint8 [G, T, N, N] ego order
    reward: torch.Tensor  # [G, T, N]
    acted: torch.Tensor  # bool [G, T, N] on the board before the step, and the game not over
    ended: torch.Tensor  # bool [G, T, N] the game is over after the step


def play_games(env: StagHuntEnv, population: str) -> Games:
    """One game in each place"""
    seats = game.Seats(env, [["mixed"] * env.config.num_players], population=population)
    state = env.initial_state()
    boards, steps = [env.observe(state)], []
    for _ in range(env.config.final_time):
        actions = game.sample(seats.action_probs(state))
        state, reward, acted, done = env.transition(state, actions)
        boards.append(env.observe(state))
        joint = env.seats_to_ego(torch.where(acted, actions, STAY)).byte()
        steps.append((joint, reward, acted, done[:, None].expand_as(acted)))
    return Games(torch.stack(boards, 1), *(torch.stack(field, 1) for field in zip(*steps, strict=True)))


def collect_games(args: Args, config: StagHuntConfig, seed: int, device) -> list[Games]:
    """To train on: at least --num-transitions transitions. To measure on: --held-out-games others"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, 256, device, seed)
    train = play_games(env, args.population)
    while int(train.acted.sum()) < args.num_transitions:
        train = tree_map(lambda *x: torch.cat(x), train, play_games(env, args.population))
    others = [play_games(env, args.population) for _ in range(math.ceil(args.held_out_games / env.num_envs))]
    return [train, tree_map(lambda *x: torch.cat(x)[: args.held_out_games], *others)]


class Dataset(NamedTuple):
    """n transitions of each seed, [S, n, ...]"""

    board: torch.Tensor  # uint8 [..., C, H, W]
    joint: torch.Tensor  # uint8 [..., N]
    seat: torch.Tensor  # int64, the observer's
    next_board: torch.Tensor
    reward: torch.Tensor
    last_step: torch.Tensor  # bool: the clock runs out with the step
    ended: torch.Tensor  # bool: the game ended with the step


def make_dataset(games: list[Games], limit: int | None = None) -> Dataset:
    """Transitions of all players while they were on the board, as many of each seed, at most `limit`"""
    parts = []
    for g in games:
        last_step = torch.zeros_like(g.acted)
        last_step[:, -1] = True
        seat = torch.arange(g.acted.shape[2], device=g.acted.device).expand_as(g.acted)
        fields = g.boards[:, :-1], g.joint, seat, g.boards[:, 1:], g.reward, last_step, g.ended
        parts.append(Dataset(*(x[g.acted][:limit] for x in fields)))
    count = min(len(part.board) for part in parts)
    return tree_map(lambda *x: torch.stack([part[:count] for part in x]), *parts)


# ---- Measuring


class Prediction(NamedTuple):
    """S models, n transitions"""

    board: torch.Tensor  # uint8 [S, n, C, H, W] the most likely next board
    reward: torch.Tensor  # [S, n]
    planes: torch.Tensor  # float [S, n, C, H, W] the numbers behind the board


@torch.no_grad()
def predict_boards(world: Stacked, data: Dataset, size: int = 2048) -> Prediction:
    parts = zip(data.board.split(size, 1), data.joint.split(size, 1), data.seat.split(size, 1), strict=True)
    parts = [Prediction(*world(*rows, method="predict"), world(*rows, method="expected_planes")) for rows in parts]
    return Prediction(*(torch.cat(field, 1) for field in zip(*parts, strict=True)))


def is_possible(config: StagHuntConfig, board, next_board, reward) -> torch.Tensor:
    """bool [...]: is each player within one step, or gone from a cell with prey, no prey new, no wall moved, the reward
    one that the game pays? Whether these fit together is not asked; exact_match asks it."""
    n, height, width = config.num_players, *board.shape[-2:]
    old, new = board.float(), next_board.float()
    old_players, new_players = old[..., :n, :, :], new[..., :n, :, :]
    padded = F.pad(old_players, (1, 1, 1, 1))
    corners = (1, 1), (0, 1), (2, 1), (1, 0), (1, 2)  # stay, and the four moves
    reach = sum(padded[..., top : top + height, left : left + width] for top, left in corners)
    free = 1 - old[..., n : n + 1, :, :]
    within_reach = (new_players <= reach * free).flatten(-3).all(-1) & (new_players.sum((-2, -1)) <= 1).all(-1)
    on_prey = (old_players * old[..., n + 1 :, :, :].amax(-3, keepdim=True)).sum((-2, -1)) > 0
    gone = (old_players.sum((-2, -1)) > 0) & (new_players.sum((-2, -1)) == 0)
    walls = (new[..., n, :, :] == old[..., n, :, :]).flatten(-2).all(-1)
    prey = (new[..., n + 1 :, :, :] <= old[..., n + 1 :, :, :]).flatten(-3).all(-1)
    payoffs = torch.tensor(list(config.payoffs()), device=board.device)
    paid = (reward[..., None] - payoffs).abs().amin(-1) < 1e-4
    return within_reach & (on_prey | ~gone).all(-1) & walls & prey & paid


def reward_event(config: StagHuntConfig, reward) -> torch.Tensor:
    """int [...]: which of EVENTS the nearest payoff belongs to"""
    payoffs = config.payoffs()
    kinds = torch.tensor([EVENTS.index(kind) for kind in payoffs.values()], device=reward.device)
    return kinds[(reward[..., None] - torch.tensor(list(payoffs), device=reward.device)).abs().argmin(-1)]


def one_step_metrics(config: StagHuntConfig, data: Dataset, predicted: Prediction) -> dict[str, torch.Tensor]:
    """Each [S]"""
    per_channel = (predicted.planes - data.next_board).square().mean((1, 3, 4))  # [S, C]
    mse = per_channel.mean(1)
    nobody = predicted.board[:, :, : config.num_players].flatten(2).amax(2) == 0
    ended = nobody | data.last_step
    possible = is_possible(config, data.board, predicted.board, predicted.reward)
    metrics = {
        "exact_match": (predicted.board == data.next_board).flatten(2).all(2).float().mean(1),
        "obs_mse": mse,
        "obs_psnr": -10 * mse.clamp(min=1e-20).log10(),
        "reward_mse": (predicted.reward - data.reward).square().mean(1),
        "end_accuracy": (ended == data.ended).float().mean(1),
        "possible_boards": possible.float().mean(1),
    }
    for channel, value in enumerate(per_channel.unbind(1)):
        metrics[f"per_channel_mse/{channel}"] = value
    true_event, event = reward_event(config, data.reward), reward_event(config, predicted.reward)
    for number, name in enumerate(EVENTS):
        hit = ((event == number) & (true_event == number)).sum(1)
        metrics[f"reward_precision/{name}"] = hit / (event == number).sum(1)
        metrics[f"reward_recall/{name}"] = hit / (true_event == number).sum(1)
    return metrics


@torch.no_grad()
def steps_ahead(world: Stacked, games: list[Games], limit: int = 2000) -> dict[str, torch.Tensor]:
    """exact_match/k [S]: exact boards after k steps of the model on its own boards, given the actions that were played.
    One list entry per seed; only rollouts in which the observer is on the board until the last step."""
    metrics = {}
    for k in STEPS_AHEAD:
        starts = [g.acted[:, k - 1 :].nonzero() for g in games]  # (game, t, observer), on the board still at t + k - 1
        count = min(limit, *(len(start) for start in starts))
        if count == 0:
            continue
        boards, joints, observers = [], [], []  # [S][count, k + 1, ...], [S][count, k, N] and [S][count]
        for g, start in zip(games, starts, strict=True):
            rows = torch.linspace(0, len(start) - 1, count, device=start.device).long()
            game, t, observer = start[rows].T[..., None]
            step = torch.arange(k + 1, device=start.device)
            boards.append(g.boards[game, t + step, observer])
            joints.append(g.joint[game, t + step[:-1], observer])
            observers.append(observer[:, 0])
        truth, joint = (torch.stack(x).transpose(1, 2) for x in (boards, joints))
        board, seat = truth[:, 0], torch.stack(observers)
        for step in range(k):
            board = world(board, joint[:, step], seat, method="predict")[0]
        metrics[f"exact_match/{k}"] = (board == truth[:, k]).flatten(2).all(2).float().mean(1)
    return metrics


def measure(world: Stacked, config: StagHuntConfig, held_out: Dataset, games: list[Games] | None = None) -> list[dict]:
    """-> one dict of floats per seed; with `games`, also k steps ahead"""
    metrics = one_step_metrics(config, held_out, predict_boards(world, held_out))
    if games is not None:
        metrics |= steps_ahead(world, games)
    return [{name: float(x[s]) for name, x in metrics.items()} for s in range(len(world))]


# ---- Tables and pictures


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def write_table(path: Path, rows: list[dict[str, float]], seeds: list[int]) -> str:
    """A CSV with one line per metric, and the same as text"""
    head = ["metric", "mean", "half_width_95", *(f"seed_{seed}" for seed in seeds)]
    values = {name: [row[name] for row in rows] for name in rows[0]}
    table = [[name, *interval(found), *found] for name, found in values.items()]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head, *table])
    lines = (f"{name:<28}{mean:>14.6g} ± {half:.2g}" for name, mean, half, *_ in table)
    return "\n".join(lines).replace(" ± nan", "")


@contextlib.contextmanager
def never_fatal(what: str):
    """Whatever goes wrong inside is reported in one line: pictures and TensorBoard never cost a run"""
    try:
        yield
    except Exception as error:
        tqdm.write(f"could not {what}: {type(error).__name__}: {error}; the run goes on")


def write_row(writer: SummaryWriter, path: Path, step: int, row: dict[str, float], details: bool) -> None:
    """To TensorBoard and metrics.jsonl. JSON has no NaN (recall of an action that nobody took, say): null"""
    row = {name: value for name, value in row.items() if details or not DETAILS.match(name)}
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    try:
        with open(path, "a") as file:
            file.write(json.dumps({"steps": step, **finite}) + "\n")
    except OSError as error:
        kept = ", the last checkpoint is safe" if (path.parent / "checkpoint.pt").exists() else ""
        raise game.UserError(f"could not write {path}{kept}: {error.strerror}") from error
    with never_fatal("write to TensorBoard"):
        for name, value in row.items():
            writer.add_scalar(name, value, step)


def draw_cases(config: StagHuntConfig, data: Dataset, predicted: Prediction, cases: list[int]):
    """A figure; each case is a row: the board, the true next one, the predicted one with the numbers behind it"""
    height = 0.7 + 3.6 * config.height / config.width
    figure = Figure((12, len(cases) * height), layout="tight")
    axes = figure.subplots(len(cases), 3, squeeze=False)
    for row, case in zip(axes, cases, strict=True):
        board, truth = data.board[case].cpu(), data.next_board[case].cpu()
        planes = predicted.planes[case].cpu()
        acts = [f"{k} {game.ACTION_NAMES[int(a)]}" for k, a in enumerate(data.joint[case]) if board[k].any()]
        titles = (
            "\n".join(", ".join(acts[k : k + 4]) for k in range(0, len(acts), 4)),
            f"true next, reward {float(data.reward[case]):.3g}",
            f"predicted, reward {float(predicted.reward[case]):.3g}, error {float((planes - truth).abs().max()):.2g}",
        )
        shown = (board, board), (truth, truth), (predicted.board[case].cpu(), planes)
        for axis, title, pair in zip(row, titles, shown, strict=True):
            axis.imshow(game.render_planes(config, *pair))
            axis.set_title(title, fontsize=9)
            axis.axis("off")
    return figure


def draw_calibration(config: StagHuntConfig, data: Dataset, predicted: Prediction):
    """A figure: the predicted values of the cells, by what is truly there"""
    names = [*(f"player {k}" for k in range(config.num_players)), "walls", "stags", "hares"]
    figure = Figure((13, 5.5), layout="tight")
    axes = figure.subplots(2, math.ceil(len(names) / 2), squeeze=False)
    for channel, (axis, name) in enumerate(zip(axes.flat, names, strict=False)):
        values, truth = (x[:2000, channel].flatten().cpu().numpy() for x in (predicted.planes, data.next_board))
        edges = np.linspace(min(-0.05, values.min()), max(1.05, values.max()), 41)
        colours, parts = ["#9aa5b1", "#d64541"], [values[truth == 0], values[truth == 1]]
        axis.hist(parts, edges, label=["truly 0", "truly 1"], color=colours, log=True)
        axis.set_title(name, fontsize=9)
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.suptitle("predicted value of a cell: counts")
    return figure


def draw_pictures(config, world, held_out: Dataset, rows: list[dict], folders: list[Path], writers, step) -> None:
    """Each seed's model on 4000 transitions: its worst cases, some others, a summary"""
    data = Dataset(*(x[:, :4000] for x in held_out))
    predicted = predict_boards(world, data)
    for s, folder in enumerate(folders):
        own, guess = Dataset(*(x[s] for x in data)), Prediction(*(x[s] for x in predicted))
        error = (guess.planes - own.next_board).square().flatten(1).sum(1) + (guess.reward - own.reward).abs()
        figures = {
            "cases_worst": draw_cases(config, own, guess, error.argsort(descending=True)[:4].tolist()),
            "cases_random": draw_cases(config, own, guess, [k * len(error) // 4 for k in range(4)]),
            "calibration_histogram": draw_calibration(config, own, guess),
        }
        figures["steps_ahead"] = Figure((5, 3.2), layout="tight")
        axis = figures["steps_ahead"].subplots()
        ahead = [k for k in STEPS_AHEAD if f"exact_match/{k}" in rows[s]]
        axis.plot(ahead, [rows[s][f"exact_match/{k}"] for k in ahead], marker="o")
        axis.set(xlabel="steps on the model's own boards", ylabel="boards exactly right", ylim=(0, 1.02))
        for name, figure in figures.items():
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=70)
            if writers:
                writers[s].add_image(name, np.array(Image.open(path).convert("RGB")), step, dataformats="HWC")


def report(args: Args, config, world, games: list[Games], held_out, folders: list[Path], writers, step) -> list[dict]:
    """The full measurement: printed, written as CSV, drawn. -> final metrics per seed"""
    rows = measure(world, config, held_out, games)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    print(f"{args.wm_head} head, {config.setting}, {len(rows)} seed(s), held-out games; CSV and pictures: {folders[0]}")
    print(write_table(folders[0] / "evaluation.csv", rows, seeds))
    with never_fatal("draw"):
        draw_pictures(config, world, held_out, rows, folders, writers, step)
    return rows


# ---- Training and files


def optimizer_step(optimizer: torch.optim.Adam, loss, max_norm: float) -> torch.Tensor:
    """One step down the sum of losses [M]. -> the norm of each learner's gradient [M], each clipped to max_norm"""
    optimizer.zero_grad()
    loss.sum().backward()
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
    optimizer.step()
    return norms


def train(args: Args, world: Stacked, optimizer, data: Dataset, first: int, last: int) -> torch.Tensor:
    """Updates `first` to `last` on data [S, n, ...] -> their mean loss [S]"""
    torch.manual_seed(1_000_003 * args.seed + first)  # so a resumed run goes on with the same numbers
    (num_seeds, size), device = data.board.shape[:2], data.board.device
    seed = torch.arange(num_seeds, device=device)[:, None]
    total = torch.zeros(num_seeds, device=device)
    for update in range(first, last):
        optimizer.param_groups[0]["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * update / args.num_updates))
        index = torch.randint(size, (num_seeds, args.batch_size), device=device)
        loss = world(*(x[seed, index] for x in data[:5]), method="loss").mean(1)
        optimizer_step(optimizer, loss, 1.0)
        total += loss.detach()
    return total / (last - first)


def check_resume(args, saved) -> None:
    """Refuses flags that differ from those of the run that goes on; MAY_CHANGE lists those that may."""
    here, there = (vars(flags) | vars(flags.config) for flags in (args, saved))
    may = ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE if name not in ("device", "resume"))
    for name, value in here.items():
        if name not in ("config", *MAY_CHANGE):
            flag, was = f"--{name.replace('_', '-')}", there[name]
            game.refuse(value != was, f"{flag} {value}: the resumed run has {was}; only {may} may change")


@contextlib.contextmanager
def stop_requests():
    """-> a list that SIGINT (Ctrl-C) or SIGTERM adds itself to; a second one ends the process at once"""
    asked, before = [], {}

    def ask(number, _):
        asked.append(number)
        os.write(2, b"\nstopping after this iteration; once more: at once\n")
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_checkpoint(path: Path, content: dict) -> None:
    """Written aside and renamed: what stands at `path` is always whole, also after a power cut. A checksum follows the
    archive."""
    try:
        torch.save(content, f"{path}.part")
        with open(f"{path}.part", "r+b") as file:
            file.write(hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.part", path)
    except (OSError, RuntimeError) as error:  # torch takes a full disk for a RuntimeError
        earlier = ", an earlier one there is untouched" if path.exists() else ""
        raise game.UserError(f"could not write {path}{earlier}: {str(error).splitlines()[0]}") from error


def load_checkpoint(path: str | Path, expected: str = FORMAT, keys: dict = KEYS) -> dict:
    """path: the checkpoint, or the run folder of any seed. keys: what it must hold -> of which type"""
    path = game.find_checkpoint(path)
    data = path.read_bytes()
    whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
    game.refuse(not whole, f"{path} ({len(data)} bytes) is damaged, cut short or no checkpoint: its checksum is wrong")
    try:
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of an archive that somebody else wrote
        raise game.UserError(f"{path} is no checkpoint: {str(error).splitlines()[0]}") from error
    found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
    game.refuse(found != expected, f"{path} is no checkpoint of this script: it is {found!r}, not {expected!r}")
    for key, kind in keys.items():
        value = saved.get(key)
        wrong = not isinstance(value, kind) or value == [] or (kind in (int, float) and value < 0)
        game.refuse(wrong, f"{path} is no whole checkpoint: its {key} is missing or wrong")
    if "problem" in saved:  # kept to be looked at
        print(f"{path} was kept because {saved['problem']}")
        return saved
    for name, x in tree_leaves_with_path(saved):
        bad = isinstance(x, torch.Tensor) and not x.isfinite().all()
        game.refuse(bad, f"{path}: {keystr(name)} holds values that are no numbers")
    return saved


def load_args(path: str, saved: dict, **changes) -> Args:
    """The flags of a checkpoint, with changes"""
    try:
        args = Args(**saved | changes | {"config": StagHuntConfig(**saved["config"])})
        validate(args)
    except (TypeError, KeyError, AttributeError) as error:
        raise game.UserError(f"{path}: its flags are not those of this script: {error}") from error
    return args


def truncate_metrics(path: Path, kept_at: Path, last_step: int) -> None:
    """Drops what was logged after the checkpoint, and what cannot be read"""
    kept = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else [], start=1):
        try:
            kept += [line + "\n"] if json.loads(line)["steps"] <= last_step else []
        except (ValueError, KeyError, TypeError, RecursionError):
            print(f"{path}: line {number} is broken, it is left out")
    if last_step and not kept:
        print(f"{path} is missing or empty: the metrics before the checkpoint are lost")
    Path(f"{kept_at}.part").write_text("".join(kept))
    os.replace(f"{kept_at}.part", kept_at)


@contextlib.contextmanager
def open_run(args, label: str, checkpoint: dict | None, step: int):
    """-> folders, one per seed, and their TensorBoard writers: new ones, or the resumed run's as they were at `step`,
    where its checkpoint lies, also if that was moved or copied. A lock keeps other processes out, however this ends."""
    seeds, stamp = range(args.seed, args.seed + args.num_seeds), int(time.time())
    while any(Path(args.run_dir).glob(f"*__{stamp}")):  # another run began in the same second
        stamp += 1
    folders = [Path(args.run_dir) / f"{args.exp_name}__{label}__{seed}__{stamp}" for seed in seeds]
    if checkpoint:
        first, names = Path(args.resume).resolve().parent, checkpoint["folders"]
        if first.name != names[0]:
            names = [f"{first.name}__{seed}" for seed in seeds]
        folders = [first, *(first.parent / name for name in names[1:])]
    earlier = folders
    if checkpoint and args.run_dir != checkpoint["args"]["run_dir"]:  # goes on elsewhere
        folders = [Path(args.run_dir) / folder.name for folder in folders]
        taken = folders[0].exists() and folders[0].resolve() != earlier[0]
        game.refuse(taken, f"--run-dir {args.run_dir}: there is a {folders[0]} already")
    flags = dataclasses.asdict(args) | {"checkpoint": f"../{folders[0].name}/checkpoint.pt"}
    table = "\n".join(f"|{name}|{value}|" for name, value in flags.items())
    with contextlib.ExitStack() as held:
        try:
            folders[0].mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folders[0] / "lock", "a+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            print(f"process {os.getpid()} on {os.uname().nodename}, since {time.ctime()}", file=lock, flush=True)
            for folder, old in zip(folders, earlier, strict=True):
                folder.mkdir(exist_ok=True)
                (folder / "args.json").write_text(json.dumps(flags, indent=2) + "\n")
                if checkpoint:
                    truncate_metrics(old / "metrics.jsonl", folder / "metrics.jsonl", step)
        except BlockingIOError as error:
            raise game.UserError(f"{folders[0]} is in use by {Path(lock.name).read_text().strip()}") from error
        except OSError as error:
            raise game.UserError(f"could not write to {error.filename or folders[0]}: {error.strerror}") from error
        threading.excepthook, before = lambda _: None, threading.excepthook  # of TensorBoard: never_fatal says it
        held.callback(setattr, threading, "excepthook", before)
        writers = []
        for folder in folders:
            writers.append(SummaryWriter(folder, purge_step=step + 1))
            held.callback(never_fatal("write to TensorBoard")(writers[-1].close))
            with never_fatal("write to TensorBoard"):
                writers[-1].add_text("hyperparameters", f"|flag|value|\n|-|-|\n{table}", step)
        yield folders, writers


def main(args: Args) -> dict[str, float]:
    """Returns the final metrics, averaged over seeds."""
    started, update, checkpoint = time.time(), 0, None
    validate(args)
    if args.evaluate is not None:
        checkpoint = load_checkpoint(args.evaluate)
        kept = {name: getattr(args, name) for name in ("device", "evaluate", "evaluate_board")}
        args = load_args(args.evaluate, checkpoint["args"], **kept, resume=None)
        game.check_writable(game.find_checkpoint(args.evaluate).parent, "--evaluate")
    config, device = validate(args), game.resolve_device(args.device)
    game.check_memory(memory_needs(args), device)
    if args.resume is not None:
        args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
        checkpoint = load_checkpoint(args.resume)
        check_resume(args, load_args(args.resume, checkpoint["args"]))
        kind, over = checkpoint["device"], checkpoint["step"] > args.num_updates
        game.refuse(kind != device.type, f"--resume {args.resume} is a run on {kind}: it cannot go on on {device.type}")
        game.refuse(over, f"--num-updates {args.num_updates}: the run has {checkpoint['step']} already")
    if checkpoint is None or args.run_dir != checkpoint["args"]["run_dir"]:
        game.check_run_flags(args)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    games, held_out_games = zip(*(collect_games(args, config, seed, device) for seed in seeds), strict=True)
    held_out = make_dataset(held_out_games)
    world = make_world_model(args, config, seeds, device)
    if checkpoint:
        try:
            world.load_state_dict(checkpoint["networks"].get("world"))
        except game.UserError as error:
            raise game.UserError(f"{args.evaluate or args.resume}: {error}") from error
    if args.evaluate is not None:
        beside = game.find_checkpoint(args.evaluate).parent / f"evaluation_{config.setting}"
        folders = [beside / f"seed_{seed}" for seed in seeds]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        rows = report(args, config, world, held_out_games, held_out, folders, [], 0)
        return {name: interval([row[name] for row in rows])[0] for name in rows[0]}

    data = make_dataset(games, args.num_transitions)
    watched = Dataset(*(x[:, :10_000] for x in held_out))
    optimizer = torch.optim.Adam(world.parameters(), args.learning_rate, fused=True)
    if checkpoint:
        try:
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise game.UserError(f"{args.resume}: its optimizer does not fit: {error}") from error
        update, started = checkpoint["step"], started - checkpoint["seconds"]
    unfinished = update < args.num_updates

    def save(name="checkpoint.pt", **more):
        content = {"format": FORMAT, "args": dataclasses.asdict(args), "device": device.type, "step": update}
        content |= {"networks": {"world": world.state_dict()}, "optimizer": optimizer.state_dict()}
        content |= {"seconds": time.time() - started, "folders": [folder.name for folder in folders]}
        names = ["num_players", "stag_reward", "hare_reward", "time_reward", "strengths", "prosocial"]
        names += ["height", "width"] if args.wm_head == "pixel" else []
        must_match = {"world_model": type(world.network).__name__}
        must_match["wm_hidden"] = args.wm_hidden
        content["must_match"] = must_match | {name: getattr(config, name) for name in names}  # where it is loaded
        save_checkpoint(folders[0] / name, content | more)

    run = open_run(args, f"{config.setting}_{args.wm_head}", checkpoint, update)
    with run as (folders, writers), stop_requests() as stop:
        what = f"{config.setting}, {args.wm_head} head, {len(world)} model(s), on {device}"
        print(f"{what}; run folder {folders[0]}", flush=True)
        with tqdm(initial=update, total=args.num_updates, unit="update", mininterval=1) as bar:
            while update < args.num_updates and not stop:
                last = min(update + args.log_every, args.num_updates)
                loss = train(args, world, optimizer, data, update, last)
                bar.update(last - update)
                update = last
                rows = measure(world, config, watched)
                for row, folder, writer, value in zip(rows, folders, writers, loss.tolist(), strict=True):
                    metrics = {"losses/world_model": value} | {f"wm/{name}": x for name, x in row.items()}
                    metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                    write_row(writer, folder / "metrics.jsonl", update, metrics, args.log_details)
                if not (loss.abs() < 1e6).all() or not all(p.abs().amax() < 1e6 for p in world.parameters()):
                    problem = f"losses/world_model is {loss.tolist()}"
                    save("checkpoint_bad.pt", problem=problem)
                    raise FloatingPointError(f"{problem}; see {folders[0]}/checkpoint_bad.pt")
                exact = np.mean([row["exact_match"] for row in rows])
                bar.set_postfix_str(f"loss {float(loss.mean()):.4g}, exact match {exact:.4%}")
                save()
        if update < args.num_updates:
            command = shlex.join(["python", sys.argv[0], "--resume", f"{folders[0]}/checkpoint.pt"])
            print(f"stopped; go on with: {command}")
            raise SystemExit(128 + stop[0])

        rows = report(args, config, world, held_out_games, held_out, folders, writers if unfinished else [], update)
        for writer, row in zip(writers, rows, strict=True):
            for name, value in row.items() if unfinished else ():
                writer.add_scalar(f"wm_final/{name}", value, update)
    print(f"{time.time() - started:.1f} s in all; checkpoint {folders[0]}/checkpoint.pt")
    means = {name: interval([row[name] for row in rows])[0] for name in rows[0]}
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **means}


if __name__ == "__main__":
    game.command_line(parse_args, main)
