"""Pretrains the world model on games of rule-based players, and measures it like a simulator.

    python pretrain_world_model.py                       # structured head, 4x4
    python pretrain_world_model.py --wm-head pixel       # every cell by its own error, to compare
    python pretrain_world_model.py --data games.npz      # recorded games: see load_data
    python pretrain_world_model.py --resume runs/RUN     # goes on where the run stopped
    python hopplus_ppo.py --world-model-checkpoint runs/RUN/checkpoint.pt

A transition is one player's view of one step: board and joint action -> next board and payoff.

Axes: S seeds, one model each, G games, T steps, N players, P prey, C planes, n transitions. A board
is uint8 [X]: the cell of each player and prey (H * W: gone), then the walls (or one 0). Players are
in ego order: who looks, the observer, comes first.
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
from stag_hunt_env import HUNT_STAG, NUM_ACTIONS, STAY, StagHuntConfig, StagHuntEnv

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "pretrain_world_model 11"  # of a checkpoint
NETWORK = {"structured": "world", "pixel": "pixel_world"}  # hopplus_ppo.py reads "world"
STEPS_AHEAD = (1, 3, 5, 10, 20)
MUST_MATCH = ("wm_hidden", "num_players", "stag_reward", "hare_reward")  # where it is loaded

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
    log_every: int = 200  # updates between two rows in the logs, and two checkpoints
    # Data
    population: str = ",".join(game.POPULATION)  # who plays: each seat draws one of these
    data: str | None = None  # learn from the games in this .npz instead
    num_transitions: int = 50_000  # transitions to learn from
    held_out_games: int = 1000  # further games to measure on
    # World model
    wm_head: Literal["structured", "pixel"] = "structured"
    """a distribution over possible boards, or every cell by mean squared error"""
    wm_hidden: int = 128  # width of the hidden layers (the pixel head's are twice as wide)
    wm_channel_weights: tuple[float, ...] | None = None
    """pixel head: weight of each plane's error, for example 2 2 2 2 1 1 1 (None: all 1)"""
    num_updates: int = 3000  # optimizer steps
    batch_size: int = 256  # transitions per update and model, drawn with replacement
    learning_rate: float = 2e-3  # at the start; falls to 0 along a cosine

    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


def parse_args() -> Args:
    """The command line's flags, checked"""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume")
    first.add_argument("--num-updates", type=int, default=argparse.SUPPRESS)
    given, others = first.parse_known_args()
    if given.resume is not None:
        refuse(len(others) > 0, f"beside --resume only --num-updates, not {' '.join(others)}")
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
    weights = args.wm_channel_weights
    planes = args.config.observation_shape[0]
    refuse(weights and args.wm_head != "pixel", "--wm-channel-weights are for --wm-head pixel")
    wrong = weights and (len(weights) != planes or not min(weights) >= 0)
    refuse(wrong, f"--wm-channel-weights: {planes} numbers of 0 or more, one per plane")


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


class WorldModel(nn.Module):
    """The rules are local: who does what in the 3x3 cells around a player, and what is there, says
    where it goes (4 neighbours, stay, gone), if the prey on its cell is taken and what is paid"""

    def __init__(self, args: Args):
        super().__init__()
        config = args.config
        self.players = config.num_players
        self.entities = config.num_players + config.num_prey
        self.gone = gone = config.num_cells  # the number of the cell that is not on the board
        cells = F.pad(torch.arange(gone).view(config.height, -1), (1, 1, 1, 1), value=gone)
        around = cells.unfold(0, 3, 1).unfold(1, 3, 1).reshape(gone, 9)
        around = F.pad(around, (0, 0, 0, 1), value=gone)  # [H*W + 1, 9]
        near = torch.full((gone + 1, gone + 1), 9)  # where around a cell another is; 9: nowhere
        near.scatter_(1, around, torch.arange(9).expand_as(around))
        near[:, gone] = 9
        moves = torch.tensor([1, 7, 3, 5, 4])  # up, down, left, right, stay
        prey = [NUM_ACTIONS] * config.num_stags + [NUM_ACTIONS + 1] * config.num_hares
        target = F.pad(around[:, moves], (0, 1), value=gone)
        tables = {"around": around, "near": near, "moves": moves, "target": target}
        tables |= {"prey": torch.tensor(prey).long(), "payoffs": torch.tensor([*config.payoffs()])}
        # Own action; per cell around: how many do what, stags, hares, walls, is it on the board
        inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS + 4)
        padding = -inputs % 8  # as in BoardEncoder
        inside = F.pad((around < gone).float(), (0, padding))  # then zeros
        tables |= {"inside": inside, "acts": torch.eye(NUM_ACTIONS)}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        self.trunk = mlp(inputs + padding, args.wm_hidden, args.wm_hidden, gain=math.sqrt(2))
        # One head per own action: a bystander is none of the party. And one payoff head per size
        # of a party: one for all would pay four hunters, who are rare, as three.
        self.payoff_cases = HUNT_STAG + 2 * self.players
        self.outcome_head = Linear(args.wm_hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = Linear(args.wm_hidden, 1, 0.01)
        self.payoff_head = Linear(args.wm_hidden, self.payoff_cases * len(self.payoffs), 0.01)

    def forward(self, board, joint):
        """board [M, n, X], joint action [M, n, N] -> logits: where each player goes [M, n, N, 6],
        is its prey taken [M, n, N], the observer's payoff [M, n, payoffs]"""
        joint = joint.long()
        cells = board[..., : self.entities].long()
        cell = cells[..., : self.players]
        kind = torch.cat([joint, self.prey.expand(*joint.shape[:2], -1)], 2)[:, :, None]
        place = torch.add(cells[:, :, None], cell[..., None], alpha=self.gone + 1)
        near = self.near.take(place)  # [M, n, N, N + P]
        seen = board.new_zeros(*joint.shape, 10 * (NUM_ACTIONS + 2))
        seen.scatter_add_(3, 10 * kind + near, torch.ones_like(near, dtype=seen.dtype))
        seen = seen.unflatten(3, (-1, 10))[..., :9].flatten(3)
        around = self.around[cell]  # [M, n, N, 9]
        inside = self.inside[cell]
        walls = F.pad(board[..., self.entities :].expand(-1, -1, self.gone), (0, 1), value=1)
        blocked = walls.gather(2, around.flatten(2)).view(around.shape)  # also off the board
        x = torch.cat([self.acts[joint], seen, blocked * inside[..., :9], inside], 3)
        x = self.trunk(x.to(board.dtype).flatten(1, 2)).relu_()  # [M, n * N, hidden]

        outcome = self.outcome_head(x).view(*joint.shape, NUM_ACTIONS, 6)
        outcome = outcome.take_along_dim(joint[..., None, None], 3)[..., 0, :]
        no_prey = ~self.on_prey(board).any(3, keepdim=True)  # nobody leaves from here
        impossible = torch.cat([blocked[..., self.moves] > 0, no_prey], 3)
        taken = self.prey_head(x).view(joint.shape)
        action = joint[..., 0]
        party = ((cell == cell[..., :1]) & (joint == joint[..., :1])).sum(2)
        hunt = HUNT_STAG + (action - HUNT_STAG) * self.players + party - 1
        payoff = self.payoff_head(x[:, :: self.players])
        case = torch.where(action >= HUNT_STAG, hunt, action)[..., None, None]
        payoff = payoff.view(*action.shape, self.payoff_cases, -1).take_along_dim(case, 2)[:, :, 0]
        return outcome.float().masked_fill(impossible, -1e9), taken.float(), payoff.float()

    def on_prey(self, board):
        """bool [M, n, N, P]: this player stands on this prey"""
        players = board[..., : self.players, None]
        return (players == board[:, :, None, self.players : self.entities]) & (players < self.gone)

    def loss(self, board, joint, next_board, payoff):
        """-> [M, n]"""
        outcome, taken, payoff_logits = self(board, joint)
        cell = board[..., : self.players].long()
        next_cell = next_board[..., : self.players].long()
        goes = (self.target[cell] == next_cell[..., None]).byte().argmax(3)
        goes = torch.where(next_cell < self.gone, goes, 5)
        outcome_loss = -outcome.log_softmax(3).gather(3, goes[..., None])[..., 0]
        on_prey = self.on_prey(board)
        lost = on_prey & (next_board[:, :, None, self.players : self.entities] == self.gone)
        lost = lost.any(3).float()
        taken_loss = F.binary_cross_entropy_with_logits(taken, lost, reduction="none")
        paid = (payoff[..., None] - self.payoffs).abs().argmin(2, keepdim=True)
        payoff_loss = -payoff_logits.log_softmax(2).gather(2, paid)[..., 0]
        player_loss = outcome_loss * (cell < self.gone) + taken_loss * on_prey.any(3)
        return player_loss.sum(2) + payoff_loss

    def predict(self, board, joint):
        """-> the most likely next board [M, n, X], payoff [M, n]"""
        outcome, taken, payoff = self(board, joint)
        target = self.target[board[..., : self.players].long()]  # from gone: gone
        players = target.gather(3, outcome.argmax(3, keepdim=True))[..., 0]
        lost = (self.on_prey(board) & (taken > 0)[..., None]).any(2)
        prey = board[..., self.players : self.entities].masked_fill(lost, self.gone)
        board = torch.cat([players, prey, board[..., self.entities :]], 2)
        return board.byte(), self.payoffs[payoff.argmax(2)]


class PixelWorldModel(nn.Module):
    """An MLP that predicts every cell of every plane, and the payoff, by mean squared error"""

    def __init__(self, args: Args):
        super().__init__()
        self.config = args.config
        channels = args.config.observation_shape[0]
        cells = math.prod(args.config.observation_shape)
        hidden = 2 * args.wm_hidden
        weights = torch.tensor(args.wm_channel_weights or [1.0] * channels)
        self.register_buffer("channel_weights", weights.view(-1, 1, 1), persistent=False)
        inputs = cells + NUM_ACTIONS * args.config.num_players
        self.layers = mlp(inputs, hidden, hidden, hidden, cells + 1)

    def forward(self, planes, joint):
        """planes [M, n, C, H, W], joint action [M, n, N] -> next planes, payoff [M, n]"""
        acts = F.one_hot(joint.long(), NUM_ACTIONS).flatten(2)
        x = self.layers(torch.cat([planes.flatten(2), acts], 2))
        return x[..., :-1].view(planes.shape), x[..., -1]

    def loss(self, board, joint, next_board, payoff):
        """-> [M, n]"""
        planes, paid = self(planes_of(self.config, board).float(), joint)
        error = (planes - planes_of(self.config, next_board)).square() * self.channel_weights
        return error.mean((3, 4)).sum(2) + (paid - payoff).square()

    def predict(self, planes, joint):
        """-> the next planes, rounded, and the payoff"""
        planes, paid = self(planes, joint)
        return (planes > 0.5).byte(), paid


def planes_of(config: StagHuntConfig, board):
    """[..., X] -> uint8 [..., C, H, W]"""
    sizes = [config.num_players + config.num_prey, config.num_wall_cells]
    return game.planes(config, *board.split(sizes, -1))


# ---- Data
def play_games(args: Args, env: StagHuntEnv) -> Tensors:
    """One game in each place, seen by each of its players: [G, T, N, ...]"""
    players = env.config.num_players
    seats = game.Seats(env, [["mixed"] * players], population=args.population)
    state = env.initial_state()
    walls = state.walls[:, None, : env.config.num_wall_cells].expand(-1, players, -1)
    steps = []
    for _ in range(env.config.final_time):
        actions = game.sample(seats.action_probs(state))
        next_state, payoff, acted, _ = env.transition(state, actions)
        step = {
            "board": torch.cat([env.cells(state), walls], 2),
            "joint": env.seats_to_ego(torch.where(acted, actions, STAY)).byte(),
            "next_board": torch.cat([env.cells(next_state), walls], 2),
            "payoff": payoff,
            "acted": acted,  # on the board before the step, and the game not over
        }
        steps.append(step)
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
    """Recorded games: an .npz with the arrays of `play_games`, and `setting`, which names the game,
    such as 4x4_4h1s"""
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
        shape = np.shape(arrays.get(name))
        wanted = (*np.shape(arrays.get("board"))[:1], *like.shape[1:])
        refuse(shape != wanted, f"{path}: {name} is {shape or 'missing'}, not {wanted}")
        games[name] = torch.from_numpy(arrays[name]).to(like)
    cells = torch.cat([games["board"], games["next_board"]])[..., : -config.num_wall_cells]
    wrong = (cells > config.num_cells).any() or (games["joint"] >= NUM_ACTIONS).any()
    refuse(bool(wrong), f"{path}: a cell beyond the board, or an action above 6")
    count = len(games["board"])
    refuse(count <= args.held_out_games, f"{path}: {count} games, see --held-out-games")
    return {name: x.to(device) for name, x in games.items()}


def transitions(games: list[Tensors], most: int = sys.maxsize) -> Tensors:
    """What players saw while they were on the board [S, n, ...], as many of each seed"""
    count = min(most, *(int(each["acted"].sum()) for each in games))
    parts = [{name: x[each["acted"]][:count] for name, x in each.items()} for each in games]
    return tree_map(lambda *x: torch.stack(x), *parts)


# ---- Measuring
def to_state(args: Args, board):
    """What the model reads and predicts: a board [..., X], or planes [..., C, H, W]"""
    return planes_of(args.config, board) if args.wm_head == "pixel" else board


def cell_values(args: Args, world: Stacked, board, joint):
    """Behind the next board: values or, of the structured head, probabilities [S, n, C, H, W]"""
    players = args.config.num_players
    planes = planes_of(args.config, board)
    if args.wm_head == "pixel":
        return world(planes.float(), joint)[0]
    outcome, taken, _ = world(board.float(), joint)
    cell = board[..., :players].long()
    nowhere = outcome.new_zeros(*cell.shape, args.config.num_cells + 1)
    target = world.network.target[cell]  # [S, n, N, 6] where each outcome leads
    goes = nowhere.scatter(3, target, outcome.softmax(3))[..., :-1]
    lost = nowhere.scatter(3, cell[..., None], taken.sigmoid()[..., None])
    lost = lost.amax(2, keepdim=True)[..., :-1]
    walls, prey = planes[:, :, players:].flatten(3).split([1, 2], 2)
    return torch.cat([goes, walls, prey * (1 - lost)], 2).view(planes.shape)


@torch.no_grad()
def predict(args: Args, world: Stacked, data: Tensors, size: int = 2048) -> Tensors:
    """Of transitions [S, n, ...]: is the next board exactly right, the values behind it, payoff"""
    parts = []
    for first in range(0, data["payoff"].shape[1], size):
        batch = {name: x[:, first : first + size] for name, x in data.items()}
        state = to_state(args, batch["board"])
        next_state, payoff = world(state.float(), batch["joint"], method="predict")
        exact = (next_state == to_state(args, batch["next_board"])).flatten(2).all(2)
        values = cell_values(args, world, batch["board"], batch["joint"])
        parts.append({"exact": exact, "values": values, "payoff": payoff})
    return tree_map(lambda *x: torch.cat(x, 1), *parts)


def measure(args: Args, data: Tensors, predicted: Tensors) -> Tensors:
    """Metrics of single steps [S]"""
    next_planes = planes_of(args.config, data["next_board"])
    channels = (predicted["values"] - next_planes).square().mean((1, 3, 4))  # [S, C]
    error = predicted["payoff"] - data["payoff"]
    metrics = {
        "exact_match": predicted["exact"].float().mean(1),
        "payoff_match": (error.abs() < 0.01).float().mean(1),
        "obs_mse": channels.mean(1),
        "obs_psnr": -10 * channels.mean(1).clamp(min=1e-20).log10(),
        "reward_mse": error.square().mean(1),
    }
    return metrics | {f"per_channel_mse/{c}": x for c, x in enumerate(channels.unbind(1))}


@torch.no_grad()
def steps_ahead(args: Args, world: Stacked, games: list[Tensors], most: int = 500) -> Tensors:
    """Plays games again in the model: for how many of the observers that are on the board in step k
    were all boards, all payoffs right up to it? [S] each"""
    games = tree_map(lambda *x: torch.stack(x), *games)  # [S, G, T, N, ...]
    games = {name: x[:, :most].transpose(1, 2).flatten(2, 3) for name, x in games.items()}
    state = to_state(args, games["board"][:, 0])
    right = paid = games["acted"][:, 0]  # [S, n]
    metrics = {}
    for k in range(1, min(max(STEPS_AHEAD), args.config.final_time) + 1):
        data = {name: x[:, k - 1] for name, x in games.items()}
        state, payoff = world(state.float(), data["joint"], method="predict")
        right = right & (state == to_state(args, data["next_board"])).flatten(2).all(2)
        paid = paid & ((payoff - data["payoff"]).abs() < 0.01)
        if k in STEPS_AHEAD:
            there = data["acted"]
            metrics[f"exact_match/{k}"] = (right & there).sum(1) / there.sum(1)
            metrics[f"payoff_match/{k}"] = (paid & there).sum(1) / there.sum(1)
    return metrics


def worst_cases(args: Args, data: Tensors, predicted: Tensors, most: int = 4) -> Tensors:
    """The transitions whose values are furthest from the truth [S, 4, ...]; boards as planes"""
    planes = {name: planes_of(args.config, data[name]) for name in ("board", "next_board")}
    error = (predicted["values"] - planes["next_board"]).square().flatten(2).sum(2)
    worst = error.topk(min(most, error.shape[1])).indices
    seed = torch.arange(len(worst), device=worst.device)[:, None]
    cases = data | planes | {f"predicted_{name}": x for name, x in predicted.items()}
    return {name: x[seed, worst].cpu() for name, x in cases.items()}


def draw_cases(config: StagHuntConfig, cases: Tensors) -> Figure:
    """Of one seed: the planes of boards, of the true next ones, the values predicted for them"""
    channels = [f"player {k}" for k in range(config.num_players)] + ["walls", "stags", "hares"]
    place = (config.width + 1) * np.arange(len(channels))  # where a plane begins
    figure = Figure((2 * len(channels), 6 * len(cases["joint"])), layout="tight")
    axes = iter(figure.subplots(3 * len(cases["joint"])))
    for case, joint in enumerate(cases["joint"]):
        acts = ", ".join(game.ACTION_NAMES[action] for action in joint)
        titles = {
            "board": f"board, {acts}",
            "next_board": f"next, payoff {cases['payoff'][case]:.4g}",
            "predicted_values": f"predicted, payoff {cases['predicted_payoff'][case]:.4g}",
        }
        for name, title in titles.items():
            strip = F.pad(cases[name][case].float(), (0, 1))  # planes side by side
            strip = strip.transpose(0, 1).flatten(1).numpy()
            axis = next(axes)
            axis.imshow(strip, cmap="Blues", alpha=0.6, vmin=0, vmax=1)
            for row, column in np.argwhere(abs(strip) > 0.005):
                axis.text(column, row, f"{strip[row, column]:.2f}", ha="center", va="center")
            axis.vlines(place[1:] - 1, -0.5, config.height - 0.5, "grey")
            axis.set_xticks(place + (config.width - 1) / 2, channels)
            axis.set_title(title)
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


def train_updates(args: Args, world: Stacked, optimizer, data: Tensors, first: int, last: int) -> Tensor:
    """Updates `first` to `last` on transitions [S, n, ...] -> their mean loss [S]"""
    torch.manual_seed(1_000_003 * args.seed + first)  # a resumed run draws the same numbers
    num_seeds, size = data["payoff"].shape
    device = data["payoff"].device
    seed = torch.arange(num_seeds, device=device)[:, None]
    total = torch.zeros(num_seeds, device=device)
    for update in range(first, last):
        falling = 0.5 * (1 + math.cos(math.pi * update / args.num_updates))
        optimizer.param_groups[0]["lr"] = args.learning_rate * falling
        index = torch.randint(size, (num_seeds, args.batch_size), device=device)
        batch = {name: x[seed, index] for name, x in data.items()}
        step = batch["joint"], batch["next_board"], batch["payoff"]
        loss = world(batch["board"].float(), *step, method="loss").mean(1)
        optimizer_step(optimizer, loss)
        total += loss.detach()
    return total / (last - first)


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
    seeds = range(args.seed, args.seed + args.num_seeds)
    games = [collect(args, args.num_transitions, seed, args.device) for seed in seeds]
    held_out_games = [others for _, others in games]
    env_steps = [int(train["acted"].any(2).sum()) for train, _ in games]
    data = transitions([train for train, _ in games], args.num_transitions)
    held_out = transitions(held_out_games)
    few = {name: x[:, :10_000] for name, x in held_out.items()}
    kind = WorldModel if args.wm_head == "structured" else PixelWorldModel
    world = Stacked(kind, args, [1000 * seed for seed in seeds], args.device)
    optimizer = torch.optim.Adam(world.params.values(), fused=True)
    update = 0
    if args.resume is not None:
        checkpoint = load_checkpoint(args.resume, FORMAT)
        try:
            world.network.load_state_dict(checkpoint["networks"][NETWORK[args.wm_head]])
        except RuntimeError as error:  # of an edited copy
            refuse(True, f"the checkpoint does not fit: {' '.join(str(error).split())}")
        optimizer.load_state_dict(checkpoint["optimizer"])
        update = checkpoint["update"]
        folder = checkpoint["folder"]
        folders = [folder, *(folder.parent / name for name in checkpoint["folders"][1:])]
    else:
        folders = make_folders(args, args.wm_head)
    writers = [open_log(args, folder, update) for folder in folders]
    print(f"{folders[0]}: {env_steps[0]} env steps to learn from")
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the block of updates is finished and saved
        signal.signal(number, lambda number, _: stop.append(number))
    bar = tqdm(initial=update, total=args.num_updates, unit="update")
    while update < args.num_updates and not stop:
        last = min(update + args.log_every, args.num_updates)
        loss = train_updates(args, world, optimizer, data, update, last)
        update = last
        refuse(not loss.isfinite().all(), f"the loss is no number in update {update}")
        metrics = measure(args, few, predict(args, world, few))
        for seed, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
            row = {f"wm/{name}": float(x[seed]) for name, x in metrics.items()}
            row["losses/world_model"] = float(loss[seed])
            row["charts/env_steps"] = env_steps[seed]  # played to learn from them
            row["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            log(folder, writer, update, row)
        exact = metrics["exact_match"].mean()
        bar.set_postfix_str(f"loss {loss.mean():.4g}, exact match {exact:.4%}")
        bar.update(update - bar.n)
        flags = vars(args) | vars(args.config)
        checkpoint = {
            "networks": {NETWORK[args.wm_head]: world.state_dict()},
            "optimizer": optimizer.state_dict(),
            "args": dataclasses.asdict(args),
            "must_match": {name: flags[name] for name in MUST_MATCH},
            "folders": [folder.name for folder in folders],
            "update": update,
        }
        write_checkpoint(folders[0] / "checkpoint.pt", checkpoint)
    bar.close()
    if stop:
        print(f"python {sys.argv[0]} --resume {folders[0]}")
        sys.exit(128 + stop[0])

    predicted = predict(args, world, held_out)
    final = measure(args, held_out, predicted) | steps_ahead(args, world, held_out_games)
    cases = worst_cases(args, held_out, predicted)
    for seed, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
        row = {name: float(x[seed]) for name, x in final.items()}
        of_seed = {name: x[seed] for name, x in cases.items()}
        figure = draw_cases(args.config, of_seed)
        folder = folder / "evaluation"
        folder.mkdir(exist_ok=True)
        np.savetxt(folder / "final.csv", [("metric", "value"), *row.items()], "%s", ",")
        np.savez(folder / "worst_cases.npz", **of_seed)
        figure.savefig(folder / "worst_cases.png", dpi=60)
        writer.add_figure("worst_cases", figure, update)
        for name, value in row.items():
            writer.add_scalar(f"wm_final/{name}", value, update)
    for name, x in final.items():
        print(f"{name:20} {x.mean():.6g}")
    print(f"python hopplus_ppo.py --world-model-checkpoint {folders[0]}")


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
