"""HOP+ on Stag Hunt, acting by search: hopplus_ppo.py, and learners who look ahead before they act.
Thousands of trees grow at once, and the policy learns from what they find.

    python hopplus_mcts.py                                       # HOP+ with tree search on 4x4
    python hopplus_mcts.py --method hop                          # HOP as published
    python hopplus_mcts.py --root gumbel --num-simulations 32    # another root
    python hopplus_mcts.py --imagination                         # and learns from imagined games
    python hopplus_mcts.py --resume runs/RUN                     # goes on where the run stopped
    torchrun --nproc-per-node 8 hopplus_mcts.py --num-envs 2048  # the games split over 8 GPUs

`main` is the loop, `train_iteration` the algorithm on one page. A bonus goes into `shape_reward`, a
layer into `ActorCritic`, a metric, a tensor [M], into `metrics` of `train_iteration`.

Axes: S seeds, E games per seed, B = S * E, N players, P prey, M learners, T steps, D numbers of a
subgoal, K co-players, n rows of any kind. A board is uint8 [X]: the cell of each player and prey
(H * W: gone), then the walls (or one 0). Players are in ego order: who looks comes first.
"""

import argparse
import contextlib
import dataclasses
import functools
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
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import HUNT_HARE, HUNT_STAG, NUM_ACTIONS, STAY, StagHuntConfig, StagHuntEnv

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "hopplus_mcts 19"
PRETRAINED = {"vae_checkpoint": "pretrain_vae 12", "world_model_checkpoint": "pretrain_world_model 11"}

Tensors = dict[str, Tensor]


# ---- Arguments
@dataclasses.dataclass
class Args:
    """The defaults are those of HOP+ on a GPU; METHODS and TRAINING have the others"""

    method: Literal["ppo", "ppo-omg", "hopplus", "hopplus-mcts", "hop"] = "hopplus-mcts"
    """sets other flags: plain PPO; with subgoals and memory; with these and imagination, or search;
    HOP as published"""
    exp_name: str = Path(__file__).stem  # first part of the run's name
    seed: int = 1  # of the first experiment; the others count up
    num_seeds: int = 1  # S, complete experiments side by side
    total_timesteps: int = 2_000_000  # env steps per seed
    share_parameters: bool = False  # one set of networks for all learners of a seed
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    run_dir: str = "runs"  # where the runs' folders are made
    resume: str | None = None  # go on with the run of this folder, with its flags
    log_every: int = 5  # iterations between two rows in the logs
    save_seconds: float = 30.0  # between two checkpoints
    # Who plays
    seats: str | None = None  # N of learner, mixed and rule-based players (None: all learn)
    population: str = ",".join(game.POPULATION)  # who plays in mixed seats and in preparation
    redraw: str = "game"  # mixed seats change after each game, never, or with a probability
    unsteady: float = 0.5  # share of games where they always change, while the memory goes on
    # PPO
    num_envs: int = 256  # E, games per seed
    num_steps: int = 32  # T, steps of each game per iteration
    learning_rate: float = 1e-3  # without imagination large ones often end with hares
    anneal_lr: bool = True  # let it fall linearly to a tenth
    policy_hidden: int = 128  # width of the policy's layers
    update_epochs: int = 4  # passes over each batch
    num_minibatches: int = 4  # minibatches per pass
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # of generalised advantage estimation
    clip_coef: float = 0.2  # clip range of the ratio
    ent_coef: float = 0.03  # weight of the entropy
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip each learner's gradient (the models': 1)
    # Subgoals and MOA
    subgoals: Literal["none", "actions", "inferred", "hop"] = "inferred"
    """what the policy reads about each co-player: nothing; its next action, predicted by a MOA that
    reads no subgoals; its subgoal; nothing, while MOA reads HOP's belief in stag or hare"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"  # Gaussian, or Gumbel-softmax
    goal_dim: int = 16  # D, the size of a subgoal (discrete: the number of categories)
    subgoal_hidden: int = 64  # width of the subgoal networks and the MOA
    subgoal_selection: Literal["conservative", "optimistic", "final"] = "conservative"
    """which state shows, in hindsight, the subgoal: of the next ones that of lowest or of highest
    value to the learner; or the last before the co-player left"""
    subgoal_horizon: int = 5  # how many states ahead that state is looked for
    hindsight_eps: float = 0.5  # share of hindsight subgoals for MOA; 0 from halfway on
    kl_coef: float = 1e-3  # weight of the KL to the subgoal in hindsight
    memory_discount: float = 0.9  # left of a history in the next game (0 if mixed seats change)
    history_reset_prob: float = 0.1  # how often nothing: else nobody learns to meet strangers
    subgoal_learning_rate: float = 1e-3  # of subgoal inference and MOA
    subgoal_updates: int = 1  # per iteration
    subgoal_batch_size: int = 8  # windows of --num-steps steps per update and learner
    vae_checkpoint: str | None = None  # start them from this checkpoint of pretrain_vae.py
    pretraining_updates: int = 200  # of each model, on rule-based games
    pretraining_games: int = 256  # rule-based games at a time, per seed
    offline_ratio: float = 0.5  # share of rule-based games in the models' batches
    # World model and imagination
    wm_hidden: int = 128  # width of the hidden layers
    wm_learning_rate: float = 1e-3
    wm_updates: int = 2  # per iteration
    wm_batch_size: int = 256  # transitions per update and learner
    world_model_checkpoint: str | None = None  # start it from one of pretrain_world_model.py
    replay_rollouts: int = 4  # iterations to learn models from; as often they watch new games
    imagination: bool = True  # learn from imagined rollouts too
    imagination_horizon: int = 16  # most steps of an imagined rollout
    trust_exact_match: float = 0.99  # imagine k steps if so many k-step predictions are exact
    ppo_real_ratio: float = 0.5  # share of real samples in PPO's batch (1: plain PPO)
    critic_data: Literal["real", "mixed"] = "mixed"  # what the critic learns from
    imagined_weight: float = 1.0  # weight of an imagined sample beside a real one
    watched_starts: float = 0.5  # share of rollouts that start in rule-based games
    # Search
    planner: Literal["mcts", "one-step", "none"] = "none"
    """how the learners act: by tree search; by looking one step ahead; by their policy"""
    root: Literal["puct", "gumbel"] = "puct"
    """pUCT; or Gumbel MuZero: noise and halving at the root, below it the improved policy"""
    num_simulations: int = 16  # per tree
    num_trees: int = 2  # per decision, each with other subgoals: their Q are averaged
    puct: float = 1.0  # pUCT's weight of the policy, with Q in units of the highest payoff
    q_temperature: float = 50.0  # plays softmax(this * Q + search_prior * log policy)
    search_prior: float = 1.0  # see there; the Gumbel root always has 1
    max_depth: int = 32  # deepest a tree may grow
    search_model: Literal["env", "world-model"] = "world-model"  # the rules, or learned ones
    infer_in_tree: bool = False  # infer subgoals at every node, not only at the root
    policy_loss: Literal["distill", "ppo"] = "distill"  # of searched steps: their policy, or PPO
    # On a GPU
    cudagraphs: bool = True  # replay whole iterations as CUDA graphs
    compile: bool = False  # fuse game, networks and losses; takes a minute at the start
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"  # bf16: acting, imagining and PPO

    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)

    def __post_init__(self):
        self.searches = self.planner != "none"
        self.distills = self.searches and self.policy_loss == "distill"
        imagines = self.searches and self.search_model == "world-model"
        self.has_world = self.imagination or imagines
        self.has_models = self.imagination or self.searches or self.subgoals != "none"
        wanted = self.pretraining_updates or self.offline_ratio or self.vae_checkpoint
        self.pretrains = self.has_models and bool(wanted or self.world_model_checkpoint)
        # How many numbers the policy reads about each co-player, and a distribution has
        sizes = {"none": 0, "actions": NUM_ACTIONS, "inferred": self.goal_dim, "hop": 0}
        self.goal_size = sizes[self.subgoals]
        self.distribution_size = self.goal_dim * (2 if self.goal_kind == "continuous" else 1)
        strangers = game.redraw_prob(self.redraw) == 1 and "mixed" in (self.seats or "")
        self.history_decay = 0.0 if strangers else self.memory_discount
        self.highest_payoff = max(map(abs, self.config.payoffs())) or 1.0


SEARCH = {"planner": "mcts", "imagination": False, "imagination_horizon": 8}
HOP = {"subgoals": "hop", "goal_kind": "discrete", "goal_dim": 2, "history_reset_prob": 0.0}
HOP |= {"pretraining_updates": 0, "offline_ratio": 0.0, "gae_lambda": 1.0, "ent_coef": 0.0}
HOP |= {"num_trees": 5, "search_model": "env", "search_prior": 0.0}
METHODS = {
    "ppo": {"subgoals": "none", "imagination": False, "memory_discount": 0.0},
    "ppo-omg": {"imagination": False},
    "hopplus": {},
    "hopplus-mcts": SEARCH,
    "hop": SEARCH | HOP,
}
FOR_TWO_CORES = {"policy_hidden": 64, "log_every": 1, "pretraining_games": 64}
FOR_TWO_CORES |= {"num_simulations": 8, "num_trees": 1}
FEW_SEARCHES = {"num_envs": 64, "total_timesteps": 40_000, "subgoal_updates": 2}
FEW_GAMES = {"num_envs": 64, "learning_rate": 2e-3, "watched_starts": 0.85}
CLOSE_FIT = {"subgoal_updates": 4, "subgoal_batch_size": 64, "wm_updates": 4, "wm_batch_size": 1024}
CLOSE_FIT |= {"pretraining_updates": 800, "pretraining_games": 1024}  # without imagination
NO_HARES = {"num_envs": 1024, "learning_rate": 2e-4}  # else PPO may end with hares
TRAINING = {  # ppo-omg as ppo; large: more than 16 cells, where that differs
    ("ppo", "cuda", "small"): CLOSE_FIT | NO_HARES | {"total_timesteps": 4_000_000},
    ("ppo", "cpu", "small"): FOR_TWO_CORES | {"total_timesteps": 350_000, "update_epochs": 3},
    ("ppo", "cpu", "large"): FOR_TWO_CORES | NO_HARES | {"total_timesteps": 3_500_000},
    ("hopplus", "cuda", "small"): {},
    ("hopplus", "cuda", "large"): {"total_timesteps": 4_000_000},
    ("hopplus", "cpu", "small"): FOR_TWO_CORES | FEW_GAMES | {"total_timesteps": 100_000},
    ("hopplus", "cpu", "large"): FOR_TWO_CORES | FEW_GAMES | {"total_timesteps": 350_000},
    ("search", "cuda", "small"): CLOSE_FIT | {"total_timesteps": 600_000},
    ("search", "cpu", "small"): FOR_TWO_CORES | FEW_SEARCHES,
}


def default_args(method: str, device: str, cells: int = 16) -> Args:
    board = "large" if cells > 16 else "small"
    row = "search" if "planner" in METHODS[method] else method.removesuffix("-omg")
    training = TRAINING.get((row, device, board), TRAINING[row, device, "small"])
    return Args(method=method, device=device, **training | METHODS[method])


def parse_args() -> Args:
    """The command line's flags, checked"""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # before the defaults
    first.add_argument("--resume")
    first.add_argument("--total-timesteps", type=int, default=argparse.SUPPRESS)
    given, others = first.parse_known_args()
    if given.resume is not None:
        refuse(len(others) > 0, f"beside --resume only --total-timesteps, not {' '.join(others)}")
        saved = load_checkpoint(given.resume, FORMAT)["args"]
        unknown = ", ".join(saved.keys() - Args.__dataclass_fields__.keys())
        refuse(unknown, f"{given.resume} has flags that this script has not: {unknown}")
        saved |= {"config": StagHuntConfig(**saved["config"]), **vars(given)}
        args = Args(**saved)
    else:
        first.add_argument("--method", choices=METHODS, default="hopplus-mcts")
        first.add_argument("--device", choices=("cpu", "cuda"), default=Args.device)
        first.add_argument("--height", type=int, default=StagHuntConfig.height)
        first.add_argument("--width", type=int, default=StagHuntConfig.width)
        given, _ = first.parse_known_args()
        default = default_args(given.method, given.device, given.height * given.width)
        args = tyro.cli(Args, default=default, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    check(args)
    return args


def check(args: Args) -> None:
    """Refuses wrong flags before anything is written"""
    shares = ("unsteady", "gamma", "gae_lambda", "hindsight_eps", "memory_discount", "ppo_real_ratio")
    shares += ("history_reset_prob", "offline_ratio", "trust_exact_match", "watched_starts")
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, int | float):
            least = 1 if type(value) is int and not name.endswith(("seed", "updates")) else 0
            most = 1 if name in shares else math.inf
            refuse(not least <= value <= most, f"{name} must be {least} to {most}, not {value}")
    config = args.config
    table = game.seats_table(args.seats, config.num_players)
    game.Seats(StagHuntEnv(config), [table], population=args.population, redraw=args.redraw)
    refuse("learner" not in table, "--seats: nobody learns")
    refuse(args.device == "cuda" and not torch.cuda.is_available(), "--device cuda: no GPU here")
    refuse(max(config.num_cells, config.final_time) > 255, "more than 255 cells or steps")
    refuse(args.num_steps * args.num_envs < args.num_minibatches, "more minibatches than samples")
    refuse(args.goal_kind == "discrete" and args.goal_dim < 2, "discrete needs --goal-dim 2")
    loads = args.vae_checkpoint or args.world_model_checkpoint
    refuse(loads and not args.has_models, "a pretrained model that nothing reads: see --subgoals")
    refuse(args.ppo_real_ratio == 0 and args.critic_data == "real", "the critic has no data")
    hop = args.subgoals == "hop"
    two = (args.goal_kind, args.goal_dim) == ("discrete", 2)
    refuse(hop and not two, "--subgoals hop needs --goal-kind discrete --goal-dim 2")
    refuse(hop and args.imagination, "--subgoals hop is not for --imagination")
    gumbel = args.searches and args.root == "gumbel"
    refuse(gumbel and args.policy_loss == "ppo", "--root gumbel needs --policy-loss distill")


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        tqdm.write(f"error: {message}", file=sys.stderr)  # not into the progress bar
        sys.exit(1)


# ---- Networks. Each is M side by side, one per learner: rows [M, n, ...], parameters [M, ...]. No
# row looks at another, so Stacked may split a batch. A parameter of your own is [1, size] and read
# by tile_weights(self.scale, x)[:, None]; layers of torch that have none work as they are.
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


class ActorCritic(nn.Module):
    """pi(a | board, clock, last joint action, subgoals of the co-players) and V of the same"""

    def __init__(self, args: Args):
        super().__init__()
        players = args.config.num_players
        hidden = args.policy_hidden
        inputs = hidden + 1 + NUM_ACTIONS * players + args.goal_size * (players - 1)
        self.padding = -inputs % 8  # as in BoardEncoder
        self.reads_actions = args.subgoals != "hop"  # it reads the state alone
        self.encoder = BoardEncoder(args.config, hidden)
        self.trunk = mlp(inputs + self.padding, hidden, hidden, gain=math.sqrt(2))
        self.both = Linear(hidden, 2 * hidden, math.sqrt(2))
        self.actor = Linear(hidden, NUM_ACTIONS, 0.01)
        self.critic = Linear(hidden, 1)

    def inputs(self, board, clock, last_joint):
        """[M, n, X], [M, n], [M, n, N] -> [M, n, _]"""
        acts = F.one_hot(last_joint.long(), NUM_ACTIONS).flatten(2).to(clock.dtype)
        clock = F.pad(clock[..., None], (self.padding, 0))
        return torch.cat([self.encoder(board.to(clock.dtype)), clock, acts * self.reads_actions], 2)

    def heads(self, inputs, goals):
        x = self.trunk(torch.cat([inputs, goals], 2)).relu_()
        return self.both(x).relu_().chunk(2, 2)

    def value(self, inputs, goals):
        """goals [M, n, K*D] -> [M, n]; hindsight_goals asks it, too"""
        return self.critic(self.heads(inputs, goals)[1]).squeeze(2)

    def forward(self, board, clock, last_joint, goals, legal):
        """legal bool [M, n, 7] -> log-probabilities [M, n, 7], values [M, n]"""
        actor_x, critic_x = self.heads(self.inputs(board, clock, last_joint), goals)
        logits = self.actor(actor_x).float()
        return logits.masked_fill(~legal, -1e9).log_softmax(2), self.critic(critic_x).squeeze(2)


# Their order says which seeds they start from
NETWORKS = {
    "policy": ActorCritic,
    "prior": SubgoalPrior,  # f_psi
    "inference": SubgoalInference,  # q_phi
    "moa": ActionModel,
    "moa_prior": ActionModel,  # given f_psi's subgoal
    "world": WorldModel,
}


# ---- Subgoals: distributions [..., parameters] over D numbers or categories
def goal_mean(args: Args, distribution):
    return distribution.chunk(2, -1)[0] if args.goal_kind == "continuous" else distribution.softmax(-1)


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


# ---- Learners and their games
REPLAYED = ("board", "clock", "first_hunt", "last_joint", "joint", "payoff", "next_board", "done")
REPLAYED += ("reset", "history")


class Games:
    """Games under way and a ring of their last rollouts [rollouts, M, T, E, ...]. watch: rule-based
    players play, the learners look on; teams: every second time one kind of them"""

    def __init__(self, args: Args, device, watch: bool = False, teams: bool = False):
        config = args.config
        seed = torch.initial_seed() + 1
        self.env = StagHuntEnv(config, args.num_seeds * args.num_envs, device, seed, args.compile)
        stays = "never" if args.history_decay else "game"
        self.seats = game.Seats(
            self.env,
            [args.seats] * args.num_seeds,
            share_parameters=args.share_parameters,
            population=args.population,
            redraw=stays if watch else args.redraw,
            watch=watch,
            teams=teams,
            unsteady=args.unsteady if args.history_decay else 0.0,
        )
        shape = self.seats.learner_seat.shape  # [M, E]
        history_size = 2 * args.subgoal_hidden if args.has_models else 0
        history_size = 4 if args.subgoals == "hop" else history_size
        players = config.num_players
        self.last_joint = torch.full((*shape, players), STAY, dtype=torch.uint8, device=device)
        self.history = torch.zeros(*shape, players - 1, history_size, device=device)
        self.rollouts = args.replay_rollouts
        self.replay = {}
        self.pushed = torch.zeros((), dtype=torch.int64, device=device)

    def boards(self, state: game.State):
        """uint8 [B, N, X]: what each seat sees"""
        config = self.env.config
        walls = state.walls[:, None, : config.num_wall_cells].expand(-1, config.num_players, -1)
        return torch.cat([self.env.cells(state), walls], 2)

    def push(self, steps: Tensors) -> None:
        slot = (self.pushed % self.rollouts)[None]
        for name in REPLAYED:
            x = steps[name][:, :1] if name == "history" else steps[name]
            if name not in self.replay:
                self.replay[name] = x.new_zeros(self.rollouts, *x.shape)
            self.replay[name].index_copy_(0, slot, x[None])
        self.pushed.add_(1)

    def sample(self, count: int, rollouts: int | None = None) -> Tensors:
        """Windows of whole rollouts [M, rollouts * T, count, ...]; None: steps [M, 1, count, ...].
        Where nothing follows the first rollout yet, its last step ends a game"""
        _, m, steps, games = self.replay["done"].shape
        device = self.pushed.device
        first, step, column = torch.rand(3, m, 1, count, device=device)
        first = (first * self.pushed.clamp(max=self.rollouts)).long()
        step = (step * steps).long()
        if rollouts is not None:
            step = torch.arange(rollouts * steps, device=device)[:, None]
        column = (column * games).long()
        learner = torch.arange(m, device=device)[:, None, None]
        ring = (first + step // steps) % self.rollouts
        place = ((ring * m + learner) * steps + step % steps) * games + column
        sample = {name: self.replay[name].flatten(0, 3)[place] for name in REPLAYED[:-1]}
        begin = (first * m + learner) * games + column
        sample["history"] = self.replay["history"].flatten(0, 3)[begin]
        newest = first == (self.pushed - 1) % self.rollouts
        sample["done"] |= newest & (step == steps - 1)
        done = sample["done"].long()
        sample["game_number"] = done.cumsum(1) - done
        return sample

    def state_dict(self) -> dict:
        saved = {name: getattr(self, name) for name in ("last_joint", "history", "replay", "pushed")}
        return saved | {"env": self.env.state_dict(), "kinds": self.seats.kinds}


class Adam:
    """Clips each learner's gradient. torch.optim would load torch's compiler: 3 seconds"""

    def __init__(self, networks, learning_rate, eps=1e-8, beta2=0.999, max_norm=1.0):
        self.params = [p for network in networks for p in network.params.values()]
        self.mean = [torch.zeros_like(p) for p in self.params]
        self.square = [torch.zeros_like(p) for p in self.params]
        self.learning_rate = torch.tensor(learning_rate, device=self.params[0].device)
        self.count = torch.zeros_like(self.learning_rate)
        self.constants = {"lr": self.learning_rate, "beta1": 0.9, "beta2": beta2, "eps": eps}
        self.constants |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        self.max_norm = max_norm

    def step(self, loss) -> Tensor:
        """Down the sum of losses [M] -> the norm of each learner's gradient [M]"""
        grads = torch.autograd.grad(loss.sum(), self.params, materialize_grads=True)
        flat = torch.cat([grad.flatten(1) for grad in grads], 1)  # [M, parameters]
        if dist.is_initialized():  # the mean over the ranks
            flat = flat / dist.get_world_size()
            dist.all_reduce(flat)
        norms = flat.norm(dim=1)
        flat = flat * (self.max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
        parts = flat.split([p[0].numel() for p in self.params], 1)
        grads = [x.contiguous().view_as(p) for x, p in zip(parts, self.params, strict=True)]
        self.count.add_(1)
        moments = self.mean, self.square, [], [self.count] * len(grads)
        with torch.no_grad():
            torch._fused_adam_(self.params, grads, *moments, **self.constants)
        return norms

    def state_dict(self) -> dict:
        return {"count": self.count, **{str(i): x for i, x in enumerate(self.mean + self.square)}}


class TrainState:
    """All that a run changes. pretraining: one model per seed watches rule-based games"""

    def __init__(self, args: Args, rank: int, device, pretraining: bool = False):
        self.args = args
        self.device = device
        self.pretraining = pretraining
        seed = 1_000_003 * args.seed + 7919 * rank
        torch.manual_seed(seed + 194 if pretraining else seed)
        self.games = Games(args, device, watch=pretraining)
        self.env = self.games.env
        self.watched = None  # rule-based games: the models must not forget them
        if args.has_models and args.offline_ratio > 0 and not pretraining:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed + 97)
                half = dataclasses.replace(args, num_envs=math.ceil(args.num_envs / 2))
                self.watched = Games(half, device, watch=True, teams=True)
            self.watched.env.generator = self.env.generator  # a CUDA graph knows of one
        m = self.games.seats.num_learners
        seeds = range(args.seed, args.seed + args.num_seeds)
        seeds = [100 * seed + i for seed in seeds for i in range(m // args.num_seeds)]
        is_bf16 = args.precision == "bf16" and device.type == "cuda"
        bf16 = torch.bfloat16 if is_bf16 else torch.float32
        wanted = {"policy": True, "moa_prior": pretraining, "world": args.has_world}
        self.networks = nets = {}
        for number, (name, kind) in enumerate(NETWORKS.items()):
            if wanted.get(name, args.has_models):
                own = [10_000 * seed + 1000 * number for seed in seeds] if number else seeds
                dtypes = [bf16, bf16] if name == "policy" else [bf16]
                nets[name] = Stacked(kind, args, own, device, *dtypes)
        policy = Adam([nets["policy"]], args.learning_rate, 1e-5, max_norm=args.max_grad_norm)
        self.optimizers = {"policy": policy}
        if args.has_models:
            learned = ("inference", "moa", *(("prior", "moa_prior") if pretraining else ()))
            models = [nets[name] for name in learned]
            self.optimizers["opponent_models"] = Adam(models, args.subgoal_learning_rate)
        if args.has_world:
            self.optimizers["world_model"] = Adam([nets["world"]], args.wm_learning_rate, beta2=0.99)
        self.eps = torch.zeros((), device=device)  # share of hindsight subgoals for MOA
        self.horizon = torch.zeros(m, dtype=torch.int64, device=device)  # of imagination
        self.sums = {}  # of metrics, since the last row in the logs
        self.times = []  # when the stages of the last iteration ended

    def state_dict(self) -> dict:
        saved = {
            "networks": {name: x.state_dict() for name, x in self.networks.items()},
            "optimizers": {name: x.state_dict() for name, x in self.optimizers.items()},
            "games": self.games.state_dict(),
            "watched": {} if self.watched is None else self.watched.state_dict(),
            "horizon": self.horizon,
            "sums": self.sums,
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            saved["cuda_random"] = torch.cuda.get_rng_state(self.device)
        return saved

    def load_state_dict(self, saved: dict) -> None:
        """Everything in place: there a CUDA graph looks for it"""
        saved = tree_map(lambda x: x.to(self.device), saved)
        for x in self.sums.values():
            x.zero_()
        for name, x in saved["sums"].items():
            self.sums.setdefault(name, torch.zeros_like(x)).copy_(x)
        copy_nested_(self.state_dict() | {"sums": {}}, saved)
        self.env.generator.set_state(saved["games"]["env"]["generator"].cpu())
        torch.set_rng_state(saved["random"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(saved["cuda_random"].cpu(), self.device)


def copy_nested_(kept: dict, saved: dict, path: str = "") -> None:
    """Into tensors of the same names and shapes. What is empty takes all"""
    if not kept or not saved:
        kept.update(saved)
        return
    strange = ", ".join(path + name for name in sorted(kept.keys() ^ saved.keys()))
    refuse(strange != "", f"the checkpoint does not fit: only there or only here is {strange}")
    for name, x in saved.items():
        here = kept[name]
        if isinstance(x, dict):
            copy_nested_(here, x, f"{path}{name}.")
            continue
        sizes = f"{list(x.shape)}, here {list(here.shape)}"
        refuse(x.shape != here.shape, f"the checkpoint does not fit: {path}{name} is {sizes}")
        here.copy_(x)


# ---- What learners see and believe, on a board that is real or imagined
def on_board(config: StagHuntConfig, board):
    """bool [...]: is the one who looks at boards [..., X] still there?"""
    return board[..., 0] < config.num_cells


def game_state(config: StagHuntConfig, board) -> game.State:
    """Boards [B, X] as games at their start, who looks in the first seat"""
    kinds = [config.num_players, config.num_prey]
    cells, walls = board.long().split([sum(kinds), config.num_wall_cells], 1)
    present, prey_alive = (cells < config.num_cells).split(kinds, 1)
    position, prey_position = cells.clamp(max=config.num_cells - 1).split(kinds, 1)
    walls = walls.expand(-1, config.num_cells)
    start = torch.zeros_like(cells[:, 0])
    return game.State(position, present, prey_position, prey_alive, walls, start, start - 1)


def views(env: StagHuntEnv, board, players: int | None = None):
    """Boards uint8 [M, n, X] -> the learner's legal actions bool [M, n, 7]; what its K co-players
    see, float [M, n*K, X], and their legal actions [M, n*K, 7]. players: of the first ones only"""
    m, n, size = board.shape
    board = board.flatten(0, 1)
    now = game_state(env.config, board)
    now = now._replace(position=now.position[:, :players], present=now.present[:, :players])
    legal = env.legal_actions(now).view(m, n, -1, NUM_ACTIONS)
    cells, walls = board.tensor_split([env.view_order.shape[1]], 1)
    seen = cells[:, env.view_order[1:players]]  # [M * n, K, N + P]
    seen = torch.cat([seen, walls[:, None].expand(-1, seen.shape[1], -1)], 2).float()
    return legal[:, :, 0], seen.view(m, -1, size), legal[:, :, 1:].flatten(1, 2)


SITUATION = ("board", "clock", "last_joint", "first_hunt", "history")  # [M, n, ...]
POLICY_READS = ("board", "clock", "last_joint", "goals", "legal")


def perceive(state: TrainState, situation: Tensors, posterior=None) -> Tensors:
    """What learners make of situations, real or imagined: SITUATION, legal and goals. In row
    i*K + k: what co-player k on board i sees (seen, features), may do (others_legal) and seems to
    want (posterior, if not given: as inferred at a root)"""
    args, networks = state.args, state.networks
    clock, history = situation["clock"], situation["history"]
    players = None if args.has_models else 1
    legal, seen, others_legal = views(state.env, situation["board"], players)
    goals = history.new_zeros(*clock.shape, 0)
    mind = {name: situation[name] for name in SITUATION} | {"legal": legal}
    if args.has_models:
        m, n, k = history.shape[:3]  # [M, n, K, 2 * hidden]
        mind |= {"seen": seen, "others_legal": others_legal}
        if posterior is None and args.subgoals == "hop":
            inferred = infer_hop_goals(state, seen, clock, others_legal, history)
            mind["features"], posterior = inferred
        elif posterior is None:
            mind["features"] = networks["inference"](seen, method="encoder")
            posterior = networks["inference"](mind["features"], history.flatten(1, 2).float())
        mind["posterior"] = posterior
        goals = goal_mean(args, posterior)
        if args.subgoals == "actions":
            clocks = clock.repeat_interleave(k, 1)
            goals = networks["moa"](seen, clocks, goals, others_legal).exp()
        goals = goals.reshape(m, n, -1)[..., : k * args.goal_size]
    return mind | {"goals": goals}


def decide(state: TrainState, mind: Tensors) -> Tensors:
    """-> mind with what the policy says"""
    log_probs, value = state.networks["policy"](*(mind[name] for name in POLICY_READS))
    return mind | {"log_probs": log_probs, "value": value}


def predict_actions(state: TrainState, mind: Tensors, noise):
    """noise [M, n*K, D] -> MOA's probabilities of the co-players' next actions [M, n, K, 7]"""
    clock, goals = mind["clock"], mind["goals"]
    if state.args.subgoals == "actions":
        return goals.unflatten(2, (-1, NUM_ACTIONS))
    goal = sample_goal(state.args, mind["posterior"], noise)
    clocks = clock.repeat_interleave(goal.shape[1] // clock.shape[1], 1)
    log_probs = state.networks["moa"](mind["seen"], clocks, goal, mind["others_legal"])
    return log_probs.exp().unflatten(1, (clock.shape[1], -1))


def update_history(state: TrainState, mind: Tensors, joint, done):
    """[M, n, K, 2 * hidden] after joint action [M, n, N]; where done, for the next game"""
    history = mind["history"]
    if state.args.subgoals == "hop":
        return add_evidence(state.args, mind, joint, done)
    acts = joint.long()[..., state.env.ego[1:]].flatten(1, 2)  # as each co-player sees them
    event = state.networks["inference"](mind["features"], acts, method="event")
    event = event * on_board(state.args.config, mind["seen"])[..., None]
    now, before = history.chunk(2, -1)
    now = now + event.unflatten(1, history.shape[1:3])
    next_game = torch.cat([torch.zeros_like(now), state.args.history_decay * (before + now)], -1)
    return torch.where(done[..., None, None], next_game, torch.cat([now, before], -1))


# ---- HOP: subgoals are stag or hare. A history [M, n, K, 4] holds how well each explains what was
# done in this game, and the prior of each, less a half.
def infer_hop_goals(state: TrainState, seen, clock, legal, history):
    """-> MOA's log-probabilities of what co-players do for a stag, for a hare [M, n*K, 14]; of what
    they want, by Bayes' rule [M, n*K, 2]"""
    goal = torch.eye(2, device=clock.device).repeat(*seen.shape[:2], 1)
    clock = clock.repeat_interleave(goal.shape[1] // clock.shape[1], 1)
    seen, legal = (x.repeat_interleave(2, 1) for x in (seen, legal))
    log_probs = state.networks["moa"](seen, clock, goal, legal)
    evidence, before = history.flatten(1, 2).float().chunk(2, -1)
    posterior = (evidence + (0.5 + before).clamp(min=1e-6).log()).log_softmax(-1)
    return log_probs.unflatten(1, (-1, 2)).flatten(2), posterior


def add_evidence(args: Args, mind: Tensors, joint, done):
    """HOP's update_history; where done, the prior for the next game, as count_hunts left it"""
    history = mind["history"]
    shape = *history.shape[:3], 2, NUM_ACTIONS
    action = joint.long()[..., 1:, None, None].expand(*shape[:4], 1)
    evidence = mind["features"].view(shape).gather(4, action)[..., 0].clamp(min=-10)
    evidence = evidence - evidence.amax(-1, keepdim=True)  # for or against, not how likely
    present = on_board(args.config, mind["seen"]).view(shape[:3])
    history = history + F.pad(evidence * present[..., None], (0, 2))
    before = history[..., 2:] * (args.history_decay > 0)
    return torch.where(done[..., None, None], F.pad(before, (2, 0)), history)


def caught_prey(config: StagHuntConfig, board, joint, next_board):
    """[..., N]: 1 for who left with a stag, 2 with a hare, else 0"""
    before = board[..., : config.num_players] < config.num_cells
    after = next_board[..., : config.num_players] < config.num_cells
    return (before & ~after) * (joint.long() - STAY)


def count_hunts(args: Args, mind: Tensors, joint, next_board):
    """The history with HOP's prior b0 = alpha b0 + (1 - alpha) 1[prey] of who has left"""
    prey = caught_prey(args.config, mind["board"], joint, next_board)[..., 1:]
    prey = F.one_hot(prey, 3)[..., 1:].float()  # [M, n, K, 2]
    change = (1 - args.memory_discount) * (prey - 0.5 - mind["history"][..., 2:])
    return mind["history"] + F.pad(change * prey.sum(3, keepdim=True), (2, 0))


# ---- Search: a tree per learner, game and goal sample, [M, n, nodes, 7]. Only the learner's own
# actions branch. All trees walk in step: a path that is over repeats its last node and writes to a
# spare node. So shapes are static, and nothing waits for the host.
ILLEGAL = -1e9
NODE = (*SITUATION, "reward", "ended", "log_probs", "value", "others_probs")


class Tree(NamedTuple):
    """Node 0 is the root, simulation k adds node k + 1, the last one is spare"""

    visits: Tensor  # [M, n, nodes, 7] of each edge
    returns: Tensor  # [M, n, nodes, 7] their sum
    child: Tensor  # int64 [M, n, nodes, 7] where the edge leads (0: nowhere yet)
    best: Tensor  # int64 [M, n, nodes] the action to try next
    best_child: Tensor  # int64 [M, n, nodes] where it leads; itself if nowhere yet
    nodes: Tensors  # NODE, [M, n, nodes, ...] each
    gumbel: Tensor  # [M, n, 7] noise of root actions, one for all trees of a decision


def completed_q(visits, returns, log_probs, value):
    """Q of each action [..., 7]; of one that was not tried, a mix of the node's value [..., 1] and
    the Q of those that were (Danihelka et al. 2022, appendix D)"""
    tried = visits > 0
    q = returns / visits.clamp(min=1)
    policy = torch.where(tried, log_probs, ILLEGAL).softmax(-1) * tried
    count = visits.sum(-1, keepdim=True)
    mixed_value = (value + count * (policy * q).sum(-1, keepdim=True)) / (1 + count)
    return torch.where(tried, q, mixed_value)


def q_transform(args: Args, visits, q):
    """What Q adds to logits, more where more was tried (there sigma, c_visit = 50)"""
    tried = 1 + visits.amax(-1, keepdim=True) / 50
    return args.q_temperature * tried * q / args.highest_payoff


def select_action(args: Args, visits, returns, log_probs, value):
    """Edges [..., 7], values [..., 1] -> the action to try next [...]"""
    count = visits.sum(-1, keepdim=True)
    if args.root == "puct":
        q = torch.where(visits > 0, returns / visits.clamp(min=1), value)
        bonus = args.puct * log_probs.exp() * count.clamp(min=1).sqrt() / (1 + visits)
        score = q / args.highest_payoff + bonus
    else:  # visits in proportion to the improved policy
        q = completed_q(visits, returns, log_probs, value)
        improved = (log_probs + q_transform(args, visits, q)).softmax(-1)
        score = improved - visits / (1 + count)
    return score.masked_fill_(log_probs <= ILLEGAL / 2, -torch.inf).argmax(-1)


@functools.cache
def sequential_halving(num_simulations: int, device) -> Tensor:
    """[considered, k]: the visits so far of what simulation k visits, if halving begins with so many
    actions: all equally often, then the better half, ... Of 4: 0 0 0 0 1 1 2 2"""
    table = []
    for considered in range(NUM_ACTIONS + 1):
        row = []
        visits = 0
        left = max(1, considered)
        phases = max(1, math.ceil(math.log2(left)))
        while len(row) < num_simulations:
            more = max(1, num_simulations // (phases * left))
            row += [visits + i for i in range(more) for _ in range(left)]
            visits += more
            left = max(min(2, left), left // 2)
        table.append(row[:num_simulations])
    return torch.tensor(table, dtype=torch.float32, device=device)


def gumbel_root_action(args: Args, tree: Tree, due):
    """Of those visited `due` [M, n, 1] times, the best by noise, logits and Q"""
    visits = tree.visits[:, :, 0]
    logits = tree.nodes["log_probs"][:, :, 0]
    q = completed_q(visits, tree.returns[:, :, 0], logits, tree.nodes["value"][:, :, :1])
    score = tree.gumbel + logits + q_transform(args, visits, q)
    score = torch.where(logits > ILLEGAL / 2, score, ILLEGAL)
    return torch.where(visits == due, score, 2 * ILLEGAL).argmax(2, keepdim=True)


def init_tree(args: Args, root: Tensors, gumbel, size: int) -> Tree:
    """What is known of roots [M, n, ...] -> trees with room for so many nodes"""
    nodes = {name: root[name][:, :, None].repeat_interleave(size, 2) for name in NODE}
    nodes["log_probs"][:, :, 1:] = ILLEGAL
    none = torch.zeros_like(nodes["log_probs"])
    pointer = torch.arange(size, device=none.device).repeat(*none.shape[:2], 1)
    edges = none, none.clone(), none.long()
    tree = Tree(*edges, torch.zeros_like(pointer), pointer, nodes, gumbel)
    update_best(args, tree, pointer[..., :1].clone())
    return tree


def select_path(tree: Tree, depth: int, allowed):
    """Follows pointers `depth` times, where allowed, bool [M, n, 1]. -> nodes [M, n, depth + 1];
    actions between them; are these edges part of the path?"""
    nodes = [torch.zeros_like(allowed, dtype=torch.int64)]
    for _ in range(depth):
        nodes.append(tree.best_child.gather(2, nodes[-1]))
    path = torch.cat(nodes, 2)
    node = path[..., :-1]
    moved = torch.cat([torch.ones_like(allowed), node[..., 1:] != node[..., :-1]], 2)
    ended = tree.nodes["ended"].gather(2, node)
    return path, tree.best.gather(2, node), moved & ~ended & allowed


def path_returns(args: Args, tree: Tree, path, on_path):
    """[M, n, depth] the return from each edge on, with V at the end"""
    length = on_path.sum(2, keepdim=True)
    reward = tree.nodes["reward"].gather(2, path[..., 1:]) * on_path
    value = tree.nodes["value"].gather(2, path.gather(2, length))
    steps = torch.arange(path.shape[2], dtype=value.dtype, device=value.device)
    powers = args.gamma**steps
    ahead = (reward * powers[:-1]).flip(2).cumsum(2).flip(2)
    return (ahead + powers[length] * value) / powers[:-1]


def update_best(args: Args, tree: Tree, changed) -> None:
    """What to try next from the nodes `changed` [M, n, c]"""
    index = changed[..., None].expand(-1, -1, -1, NUM_ACTIONS)
    edges = tree.visits, tree.returns, tree.nodes["log_probs"], tree.child
    *edges, child = (x.gather(2, index) for x in edges)
    value = tree.nodes["value"].gather(2, changed)
    best = select_action(args, *edges, value[..., None])
    child = child.gather(3, best[..., None])[..., 0]
    tree.best.scatter_(2, changed, best)
    tree.best_child.scatter_(2, changed, torch.where(child > 0, child, changed))


def draw(probs, uniform):
    """[..., 7], [...] -> the action whose stretch of [0, 1) holds `uniform`"""
    edges = probs.cumsum(-1)
    return (edges[..., :-1] <= uniform[..., None] * edges[..., -1:]).sum(-1)


def env_transition(games: Games, board, joint):
    """The game's rules, the same for all seats -> next boards [M, n, X], payoffs [M, n]"""
    before = game_state(games.env.config, board.flatten(0, 1))
    after, reward, _, _ = games.env.transition(before, joint.flatten(0, 1))
    return games.boards(after)[:, 0].view(board.shape), reward[:, 0].view(board.shape[:2])


def expand(state: TrainState, node: Tensors, joint) -> Tensors:
    """Where a joint action [M, n, N] leads from nodes [M, n, ...], all that shape_reward gets"""
    args = state.args
    new = imagined_step(state, node, joint, args.search_model)
    new["reward"] = shape_reward(state, new["payoff"], node, joint, new["board"])
    new["history"] = node["history"]
    if args.infer_in_tree:
        mind = perceive(state, node)
        new["history"] = update_history(state, mind, joint, torch.zeros_like(new["ended"]))
    return new


def evaluate(state: TrainState, node: Tensors, posterior, noise) -> Tensors:
    """Nodes [M, n, ...] with what networks say of them; posterior, noise: see search"""
    mind = perceive(state, node, posterior)
    record_time(state, "infer_subgoals")
    if noise is None:
        noise = goal_noise(state.args, mind["posterior"])
    others_probs = predict_actions(state, mind, noise)
    record_time(state, "moa")
    return node | decide(state, mind) | {"others_probs": others_probs}


def search(state: TrainState, root: Tensors, posterior, noise) -> Tree:
    """Grows trees from nodes [M, n, ...]. posterior, noise [M, n*K, _]: what co-players want in a
    whole tree; None: inferred anew at each node"""
    args = state.args
    m, n, co_players = root["history"].shape[:3]
    simulations = args.num_simulations if args.planner == "mcts" else NUM_ACTIONS
    deepest = min(simulations, args.max_depth) if args.planner == "mcts" else 1
    stride = math.ceil(deepest / 4) if args.compile else 1  # four depths: each is compiled anew
    spare = simulations + 1
    uniform = torch.rand(simulations, m, n, co_players, device=state.device)  # what they do
    gumbel = torch.rand(m, n // args.num_trees, NUM_ACTIONS, device=state.device)
    gumbel = -(-gumbel.clamp(1e-6, 1 - 1e-6).log()).log().repeat_interleave(args.num_trees, 1)
    tree = init_tree(args, evaluate(state, root, posterior, noise), gumbel, spare + 1)
    record_time(state, "network")
    visits, returns, child = (x.flatten(2) for x in tree[:3])  # views
    legal = tree.nodes["log_probs"][:, :, 0] > ILLEGAL / 2
    allowed = torch.ones_like(legal[..., :1])
    due = sequential_halving(simulations, state.device)[legal.sum(2)]  # [M, n, simulations]
    first = (spare + 1) * torch.arange(m * n, device=state.device).view(m, n)
    for k in range(simulations):
        # Select: each node knows what to try next.
        if args.planner == "one-step":
            tree.best[:, :, 0] = k
            tree.best_child[:, :, 0] = 0
            allowed = legal[..., k : k + 1]
        elif args.root == "gumbel":
            action = gumbel_root_action(args, tree, due[..., k : k + 1])
            tree.best[:, :, :1] = action
            tree.best_child[:, :, :1] = tree.child[:, :, 0].gather(2, action)
        depth = min(deepest, stride * (k // stride + 1))
        path, action, on_path = select_path(tree, depth, allowed)
        last = (on_path.sum(2, keepdim=True) - 1).clamp(min=0)  # edge
        parent = path.gather(2, last)
        end = path.gather(2, last + 1)
        end = torch.where(end == parent, k + 1, end)
        path.scatter_(2, last + 1, end)
        record_time(state, "select")

        # Expand: what the co-players do, and where that leads.
        place = first + parent[..., 0]
        node = {name: x.flatten(0, 2)[place] for name, x in tree.nodes.items()}
        others = draw(node["others_probs"], uniform[k])
        new = expand(state, node, torch.cat([action.gather(2, last), others], 2))
        record_time(state, "expand")
        new = evaluate(state, new, posterior, noise)
        new["value"] = torch.where(new["ended"], 0.0, new["value"])
        for name, x in tree.nodes.items():
            x[:, :, k + 1] = new[name]
        record_time(state, "network")

        # Back up: returns to the edges of the path, the new child, what to try next.
        edge = torch.where(on_path, path[..., :-1], spare) * NUM_ACTIONS + action
        edge_returns = path_returns(args, tree, path, on_path)
        visits.scatter_add_(2, edge, torch.ones_like(edge_returns))
        returns.scatter_add_(2, edge, edge_returns)
        child.scatter_(2, edge.gather(2, last), end)
        on_path = F.pad(on_path, (1, 0), value=True)
        update_best(args, tree, torch.where(on_path, path, spare))
        record_time(state, "backup")
    return tree


def root_policy(args: Args, tree: Tree) -> Tensors:
    """What the trees of a decision say together. pUCT plays the improved policy, a softmax of Q and
    logits; the Gumbel root the best by noise, logits and Q, with one tree among the most visited"""

    def by_decision(x):  # [M, n, nodes, ...] -> of the roots [M, E, trees, ...]
        return x[:, :, 0].unflatten(1, (-1, args.num_trees))

    visits = by_decision(tree.visits)
    logits = by_decision(tree.nodes["log_probs"])
    value = by_decision(tree.nodes["value"])
    q = completed_q(visits, by_decision(tree.returns), logits, value[..., None]).mean(2)
    edges = tree.visits[:, :, :-1].sum((2, 3))  # a path of d edges counts d times
    depth = edges.view(value.shape) / visits.sum(3).clamp(min=1)
    visits = visits.sum(2)
    logits = logits[:, :, 0]
    legal = logits > ILLEGAL / 2
    prior = args.search_prior * logits
    gain = args.q_temperature * q / args.highest_payoff
    if args.root == "gumbel":
        prior = logits
        gain = q_transform(args, visits / args.num_trees, q)
    improved = torch.where(legal, prior + gain, ILLEGAL).log_softmax(-1)
    ended = by_decision(tree.nodes["ended"])[:, :, :1]  # nothing was searched
    improved = torch.where(ended, logits, improved)
    played = improved.exp()
    if args.root == "gumbel" and args.planner == "mcts":
        score = tree.gumbel[:, :: args.num_trees] + logits + gain
        if args.num_trees == 1:  # several trees do not agree on whom they visit most
            most = torch.where(legal, visits, -1)
            score = torch.where(most == most.amax(2, keepdim=True), score, 2 * ILLEGAL)
        played = F.one_hot(score.argmax(2), NUM_ACTIONS).float()
    return {
        "log_probs": improved,
        "played": played,
        "visits": visits,
        "q": q,
        "search/gain": ((improved.exp() - logits.exp()) * q).sum(2),  # in Q over the policy
        "search/kl": (improved.exp() * (improved - logits).clamp(-50, 50)).sum(2),
        "search/depth": depth.mean(2),  # mean length of a path
    }


def plan_actions(state: TrainState, mind: Tensors) -> tuple[Tensors, Tree]:
    """Searches from what learners perceived [M, E, ...] -> root_policy, Tree"""
    args = state.args
    record_time(state, "rollout")
    root = {name: mind[name] for name in SITUATION}
    root["reward"] = torch.zeros_like(mind["value"])
    root["ended"] = ~on_board(args.config, mind["board"])
    posterior = noise = None
    if not args.infer_in_tree:
        posterior = mind["posterior"].unflatten(1, mind["history"].shape[1:3])
        posterior = posterior.repeat_interleave(args.num_trees, 1).flatten(1, 2)
        noise = goal_noise(args, posterior)
        root["history"] = mind["history"][..., :0]
    root = {name: x.repeat_interleave(args.num_trees, 1) for name, x in root.items()}
    record_time(state, "infer_subgoals")
    tree = search(state, root, posterior, noise)
    plan = root_policy(args, tree)
    record_time(state, "backup")
    return plan, tree


# ---- Rollout
def shape_reward(state: TrainState, payoff, mind: Tensors, joint, next_board):
    """The learner's reward for a step, real or imagined: the game's payoff [M, n], or that and your
    bonus. mind: what `perceive` and `decide` said before the step (--method ppo has no models, in
    imagined steps MOA's own draws are played); its board is uint8 [M, n, X], itself first, cell =
    row * width + column: .long() before you subtract. joint [M, n, N]"""
    return payoff


def as_sample(state, mind: Tensors, joint, payoff, next_board, ended, mask) -> Tensors:
    """A step [M, n, ...] for PPO. mask: does it count? (not: has left, is beyond the horizon)"""
    action = joint[..., :1].long()
    return {
        **{name: mind[name] for name in POLICY_READS},
        "action": action,
        "log_prob": mind["log_probs"].gather(2, action)[..., 0],
        "log_probs": mind["log_probs"],
        "payoff": payoff,
        "reward": shape_reward(state, payoff, mind, joint, next_board),
        "ended": ended,
        "mask": mask,
    }


def stack_steps(steps: list[Tensors], dim: int = 1) -> Tensors:
    return {name: torch.stack([step[name] for step in steps], dim) for name in steps[0]}


@torch.no_grad()
def rollout(state: TrainState, games: Games) -> tuple[dict, dict]:
    """Plays --num-steps steps of all games. -> a dict of [M, T, E, ...] for the replay and PPO
    (value: one step more); sums over the games that ended [S, N]"""
    args = state.args
    env = games.env
    seats = games.seats
    searches = args.searches and not seats.watch
    reset_prob = args.history_reset_prob if args.history_decay else 0.0
    steps, values, ends = [], [], []
    boards = games.boards(env.state)
    for step in range(args.num_steps + 1):
        situation = {
            "board": seats.to_learners(boards),
            "clock": seats.per_learner(env.clock(env.state)),
            "last_joint": games.last_joint.clone(),
            "first_hunt": seats.per_learner(env.state.first_hunt),
            "history": games.history.clone(),
        }
        mind = decide(state, perceive(state, situation))
        values.append(mind["value"])
        if step == args.num_steps:
            break
        if searches:
            times = state.times
            state.times = times if step == 0 else None  # events take time
            mind |= plan_actions(state, mind)[0]
            state.times = times
        probs = seats.action_probs(env.state, None if seats.watch else mind["log_probs"].exp())
        played = seats.to_seats(mind["played"], probs) if searches else probs
        actions = game.sample(played)  # [B, N]
        joint = seats.to_learners(env.seats_to_ego(actions)).byte()
        payoffs, _, over = env.advance(actions)  # [B, N], [B]
        seats.update(over)
        done = seats.per_learner(over)
        boards = games.boards(env.state)
        next_board = torch.where(over[:, None, None], games.boards(env.final_state), boards)
        next_board = seats.to_learners(next_board)
        games.last_joint.copy_(joint.masked_fill(done[..., None], STAY))
        present = on_board(args.config, mind["board"])
        ended = done | (present & ~on_board(args.config, next_board))
        payoff = seats.to_learners(payoffs)
        sample = as_sample(state, mind, joint, payoff, next_board, ended, present)
        sample |= {name: x for name, x in mind.items() if name.startswith("search/")}
        if args.has_models:
            if args.subgoals == "hop":
                mind["history"] = count_hunts(args, mind, joint, next_board)
            next_history = update_history(state, mind, joint, done)
            reset = (torch.rand(done.shape, device=env.device) < reset_prob) & done
            games.history.copy_(next_history.masked_fill(reset[..., None, None], 0.0))
            sample |= {
                "first_hunt": situation["first_hunt"].short(),
                "joint": joint,
                "next_board": next_board,  # of the same game, also at its end
                "done": done,
                "history": situation["history"].bfloat16(),
                "reset": reset,  # was it cleared after the step?
                "others_probs": seats.to_learners(env.seats_to_ego(probs))[:, :, 1:],
            }
        steps.append(sample)
        end = {"ended": over, "return": env.final_return.clone(), "prey": env.final_prey}
        ends.append(end | {"length": env.final_state.time.clone()})
    ends = stack_steps(ends, 0)  # [T, B, N], [T, B]
    prey = ends.pop("prey")
    ends = {name: x.view(*prey.shape[:2], -1).expand_as(prey) for name, x in ends.items()}
    ends |= {"stag": prey == HUNT_STAG, "hare": prey == HUNT_HARE}
    sums = {f"games/{name}": (ends["ended"] * x).float() for name, x in ends.items()}
    sums = {name: x.unflatten(1, (args.num_seeds, -1)).sum((0, 2)) for name, x in sums.items()}
    return {**stack_steps(steps), "value": torch.stack(values, 1)}, sums


# ---- Training of the models
def sample_replays(state: TrainState, share: float, count: int, rollouts=None) -> Tensors:
    """A share of the samples from the watched games: at least one unless it is 0 or 1"""
    if state.watched is None:
        return state.games.sample(count, rollouts)
    watched = round(count * share)
    if 0 < share < 1:
        watched = min(max(watched, 1), count - 1)
    sizes = {state.games: count - watched, state.watched: watched}
    parts = [games.sample(size, rollouts) for games, size in sizes.items() if size > 0]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    total = (x * weight).flatten(1).sum(1)
    return total / weight.flatten(1).sum(1).clamp(min=1e-6)


def variance(x, weight):
    """[M, T, E] -> [M]"""
    return masked_mean((x - masked_mean(x, weight)[:, None, None]).square(), weight)


def encode_history(state: TrainState, windows: dict, seen):
    """update_history along windows [M, T, G, ...], all steps at once. seen [M, n, X] by co-players,
    n = T*G*K -> features [M, n, hidden]; the history before each step [M, T, G, K, 2 * hidden]"""
    start = windows["history"][:, 0].float()
    shape = *windows["done"].shape[1:], start.shape[2]  # [T, G, K]
    features = state.networks["inference"](seen, method="encoder")
    acts = windows["joint"].long()[..., state.env.ego[1:]].flatten(1, 3)
    event = state.networks["inference"](features, acts, method="event")
    event = (event * on_board(state.args.config, seen)[..., None]).unflatten(1, shape)
    now, before = start.chunk(2, -1)
    event = torch.cat([now[:, None], event], 1)  # what was known at the start comes first
    games_before = windows["game_number"]
    resets_before = windows["reset"].cumsum(1) - windows["reset"].long()
    games_ago = games_before[:, :, None] - F.pad(games_before, (0, 0, 1, 0))[:, None]
    forgotten = resets_before[:, :, None] > F.pad(resets_before, (0, 0, 1, 0))[:, None]
    earlier = torch.ones(shape[0], shape[0] + 1, device=seen.device).tril()  # [t, event]
    left = state.args.history_decay ** games_ago.clamp(min=0) * ~forgotten * earlier[..., None]
    weight = torch.cat([left * (games_ago == 0), left * (games_ago > 0)], 1)
    sum_now, sum_before = torch.einsum("mtug,mugkh->mtgkh", weight, event).chunk(2, 1)
    sum_before = sum_before + left[:, :, 0, :, None, None] * before[:, None]
    return features, torch.cat([sum_now, sum_before], -1)


def hindsight_goals(state: TrainState, windows: dict, goals, prior, ahead):
    """The subgoal that each co-player turned out to pursue, f_psi(s^g). windows [M, T, G, ...];
    goals [M, T, G, K, D] as inferred; of these and later steps, U in all: f_psi, prior
    [M, U, G, K, _]; are player and game still there, ahead [M, T, U, G, K] -> as prior, of T"""
    args = state.args
    policy = state.networks["policy"]
    steps, ends = ahead.shape[1:3]
    index = torch.arange(ends, device=prior.device)
    now = index[:steps, None]
    if args.subgoal_selection == "final" or args.subgoals != "inferred" or state.pretraining:
        ahead = ahead & (index >= now)[..., None, None]
        chosen = torch.where(ahead, index[:, None, None], -1).amax(2)  # [M, T, G, K]
        has_goal = chosen >= 0
    else:
        later = now + torch.arange(1, args.subgoal_horizon + 1, device=prior.device)  # [T, h]
        inside = later.clamp(max=ends - 1)
        valid = ahead[:, now, inside] & (later < ends)[..., None, None]  # [M, T, h, G, K]
        # V(s_t, g): the critic's value if co-player j pursued its candidate, others as inferred
        candidates = goal_mean(args, prior)[:, inside][:, :, :, :, None]  # [M, T, h, G, 1, K, D]
        is_j = torch.eye(goals.shape[3], device=prior.device)[..., None] > 0  # [j, K, 1]
        tried = torch.where(is_j, candidates, goals[:, :, None, :, None])
        step = (windows[name].flatten(1, 2) for name in ("board", "clock", "last_joint"))
        inputs = policy(*step, method="inputs").unflatten(1, goals.shape[1:3])  # [M, T, G, _]
        inputs = inputs[:, :, None, :, None].expand(*tried.shape[:5], -1)
        value = policy(inputs.flatten(1, 4), tried.flatten(5).flatten(1, 4), method="value")
        value = value.view(tried.shape[:5])
        score = value if args.subgoal_selection == "conservative" else -value
        steps_ahead = 1 + torch.where(valid, score, math.inf).argmin(2)
        chosen = (now[..., None] + steps_ahead).clamp(max=ends - 1)
        has_goal = valid.any(2)
    chosen = torch.where(has_goal, chosen, now[..., None])[..., None]  # else the present state
    return prior.take_along_dim(chosen, 1)


def opponent_losses(state: TrainState) -> Tensors:
    """[M], of windows of 2 * T steps: the first T are learned from, games go on in the others"""
    args, networks = state.args, state.networks
    windows = sample_replays(state, args.offline_ratio, args.subgoal_batch_size, rollouts=2)
    if args.subgoals == "hop":
        return hop_losses(state, windows)
    _, seen, legal = views(state.env, windows["board"].flatten(1, 2))
    with torch.set_grad_enabled(state.pretraining):
        prior = networks["prior"](seen)
    game_number = windows["game_number"]
    present = on_board(args.config, seen).view(*game_number.shape, -1)  # [M, 2 * T, G, K]
    priors = prior.detach().view(*present.shape, -1)
    same_game = game_number[:, : args.num_steps, None] == game_number[:, None]
    ahead = same_game[..., None] & present[:, None]  # [M, t, u, G, K]

    windows = {name: x[:, : args.num_steps] for name, x in windows.items()}
    same_game = same_game[:, :, : args.num_steps, :, None]
    shape = _, steps, games, k = present[:, : args.num_steps].shape
    seen, legal, prior = (x[:, : steps * games * k] for x in (seen, legal, prior))
    features, history = encode_history(state, windows, seen)
    history = history.flatten(1, 3)
    posterior = networks["inference"](features, history)
    with torch.no_grad():
        inferred = goal_mean(args, posterior).view(*shape, -1)
        hindsight = hindsight_goals(state, windows, inferred, priors, ahead).flatten(1, 3)
    goal = sample_goal(args, posterior, goal_noise(args, posterior))
    moa_goal = goal_mean(args, posterior)
    if args.subgoals != "actions":
        # A subgoal outlasts a step: every second time MOA reads that of an earlier step of the
        # game. And in a share eps f_psi's in hindsight.
        now = torch.arange(steps, device=goal.device).view(1, -1, 1, 1)
        age = now - same_game.byte().argmax(2)
        back = torch.rand(shape, device=goal.device) * (age + 1)
        back = back * (torch.rand(shape, device=goal.device) < 0.5)
        earlier = F.one_hot(now - back.long(), steps).float()
        # A product, as the gradient of gather differs run by run.
        moa_goal = torch.einsum("mtgku,mugkd->mtgkd", earlier, goal.view(*shape, -1)).flatten(1, 3)
        use_hindsight = torch.rand(*goal.shape[:2], 1, device=goal.device) < state.eps
        moa_goal = torch.where(use_hindsight, goal_mean(args, hindsight), moa_goal)

    # Each co-player's game weighs the same: those who wander about would drown those who hunt.
    present = present[:, :steps]
    weight = (present / (same_game & present[:, None]).sum(2).clamp(min=1)).flatten(1)
    clock = windows["clock"].flatten(1).repeat_interleave(k, 1)
    action = windows["joint"][..., 1:].flatten(1).long()[..., None]
    cells, walls = seen.tensor_split([state.env.view_order.shape[1]], 2)
    planes = game.planes(args.config, cells, walls).flatten(2).float()

    def moa_loss(moa, goal):
        log_probs = moa(seen, clock, goal, legal)
        return masked_mean(-log_probs.gather(2, action)[..., 0], weight)

    def reconstruction_loss(decoder, *inputs):
        logits = decoder(torch.cat(inputs, 2), method="decoder")
        error = F.binary_cross_entropy_with_logits(logits, planes, reduction="none")
        return masked_mean(error.mean(2), weight)

    loss = moa = moa_loss(networks["moa"], moa_goal)
    recon = reconstruction_loss(networks["inference"], goal, scale_history(history))
    kl = masked_mean(goal_kl(args, posterior, hindsight), weight)
    if args.subgoals != "actions":
        loss = moa + recon + args.kl_coef * kl
    if state.pretraining:  # f_psi is a VAE whose subgoal also tells the action
        goal = sample_goal(args, prior, goal_noise(args, prior))
        prior_kl = masked_mean(goal_kl(args, prior, torch.zeros_like(prior)), weight)
        prior_loss = reconstruction_loss(networks["prior"], goal) + args.kl_coef * prior_kl
        loss = loss + (prior_loss + moa_loss(networks["moa_prior"], goal))
    return {"losses/moa": moa, "omg/recon": recon, "omg/kl": kl, "losses/opponent_models": loss}


def hop_losses(state: TrainState, windows: Tensors) -> Tensors:
    """HOP: MOA given the prey, stag or hare, that the co-player took, where these steps show it"""
    config = state.args.config
    steps = state.args.num_steps
    game_number = windows["game_number"]
    same_game = (game_number[:, :steps, None] == game_number[:, None])[..., None]
    prey = caught_prey(config, windows["board"], windows["joint"], windows["next_board"])
    taken = (same_game * prey[:, None, ..., 1:]).amax(2)  # [M, T, G, K]: 1 stag, 2 hare
    windows = {name: x[:, :steps] for name, x in windows.items()}
    _, seen, legal = views(state.env, windows["board"].flatten(1, 2))
    counts = on_board(config, seen).view(taken.shape) & (taken > 0)
    in_game = (same_game[:, :, :steps] & counts[:, None]).sum(2)
    weight = (counts / in_game.clamp(min=1)).flatten(1)
    goal = F.one_hot((taken.flatten(1) - 1).clamp(min=0), 2).float()
    clock = windows["clock"].flatten(1).repeat_interleave(taken.shape[3], 1)
    action = windows["joint"][..., 1:].flatten(1).long()[..., None]
    log_probs = state.networks["moa"](seen, clock, goal, legal)
    loss = masked_mean(-log_probs.gather(2, action)[..., 0], weight)
    return {"losses/moa": loss, "losses/opponent_models": loss}


def world_model_losses(state: TrainState) -> Tensors:
    args = state.args
    batch = sample_replays(state, args.offline_ratio, args.wm_batch_size)
    board, *step = (batch[name][:, 0] for name in ("board", "joint", "next_board", "payoff"))
    losses = state.networks["world"](board.float(), *step, method="loss")
    return {"losses/world_model": masked_mean(losses, on_board(args.config, board))}


def train_model(state: TrainState, name: str, losses_of, updates: int) -> Tensors:
    """-> the losses [M], means over the updates"""
    losses = []
    for _ in range(updates):
        losses.append(losses_of(state))
        state.optimizers[name].step(losses[-1][f"losses/{name}"])
    return {name: x.detach().mean(0) for name, x in stack_steps(losses, 0).items()} if losses else {}


# ---- Imagination
@torch.no_grad()
def measure_horizon(state: TrainState, steps: Tensors) -> Tensors:
    """Fresh games again in the world model: for how many steps are boards and payoffs right?"""
    args = state.args
    world = state.networks["world"]
    stride = math.ceil(steps["done"].shape[2] / 1024)
    length = min(args.imagination_horizon, args.num_steps)
    boards, payoffs = [steps["board"][:, 0, ::stride]], []
    for joint in steps["joint"][:, :length, ::stride].unbind(1):
        board, payoff = world(boards[-1].float(), joint, method="predict")
        boards.append(board)
        payoffs.append(payoff)
    real = {name: x[:, :length, ::stride] for name, x in steps.items()}  # [M, k, games, ...]
    over = F.pad(real["done"], (0, 0, 1, 0))[:, :-1].cumsum(1)
    valid = on_board(args.config, real["board"]) & (over == 0)
    right = (torch.stack(boards[1:], 1) == real["next_board"]).all(3)
    paid = (torch.stack(payoffs, 1) - real["payoff"]).abs() < 0.01
    right, paid = (x.cumprod(1) * valid for x in (right, paid))
    count = valid.sum(2)  # [M, k]
    trusted = (right * paid).sum(2) >= args.trust_exact_match * count
    horizon = (trusted & (count[:, :1] > 0)).cumprod(1).sum(1)
    state.horizon.copy_(torch.where(count[:, 0] > 0, horizon, state.horizon))  # else: not measured
    unknown = (steps["payoff"][..., None] - world.network.payoffs).abs().amin(3)
    metrics = {"wm/horizon": horizon.float(), "wm/unknown_reward": unknown.flatten(1).amax(1)}
    for name, x in {"exact": right, "payoff": paid}.items():
        matches = (x.sum(2) / count).unbind(1)
        metrics |= {f"wm/{name}_match/{k}": match for k, match in enumerate(matches, 1)}
    return metrics


def imagined_step(state: TrainState, situation: Tensors, joint, model="world-model") -> Tensors:
    """Joint action [M, n, N] in the world model -> the next situations, payoff, ended [M, n]"""
    config = state.args.config
    if model == "env":
        board, payoff = env_transition(state.games, situation["board"], joint)
    else:
        board, payoff = state.networks["world"](situation["board"].float(), joint, method="predict")
    time_next = (situation["clock"] * config.final_time).round().int() + 1
    ended = ~on_board(config, board) | (time_next >= config.final_time)
    first_hunt = situation["first_hunt"]
    if config.steps_after_first_hunt is not None:
        taken = (board != situation["board"])[..., config.num_players :].any(2)
        first_hunt = torch.where(taken & (first_hunt < 0), time_next, first_hunt)
        ended |= (first_hunt >= 0) & (time_next - first_hunt >= config.steps_after_first_hunt)
    return {
        "board": board,
        "clock": time_next / config.final_time,
        "last_joint": joint,
        "first_hunt": first_hunt,
        "payoff": payoff,
        "ended": ended,
    }


@torch.no_grad()
def imagine(state: TrainState) -> Tensors:
    """Rollouts in the world model, as many as --ppo-real-ratio asks for, [M, h, n, ...] for PPO"""
    args = state.args
    m, games = state.games.last_joint.shape[:2]
    real_ratio = args.ppo_real_ratio or 0.5  # 0: as many as there would be real ones
    samples_wanted = args.num_steps * games * (1 - real_ratio) / real_ratio
    rows = math.ceil(samples_wanted / args.imagination_horizon)
    num_windows = max(math.ceil(4 * rows / args.num_steps), 1 if state.watched is None else 2)
    windows = sample_replays(state, args.watched_starts, num_windows, rollouts=1)
    _, seen, _ = views(state.env, windows["board"].flatten(1, 2))
    windows["history"] = encode_history(state, windows, seen)[1]  # by the present q_phi
    starts = {name: windows[name].flatten(0, 2) for name in SITUATION}  # [M * T * windows, ...]
    present = on_board(args.config, windows["board"]).flatten(1)
    there_first = present.byte().argsort(dim=1, descending=True, stable=True)
    num_present = present.sum(1, keepdim=True)
    first = present.shape[1] * torch.arange(m, device=state.device)[:, None]

    def draw_starts():
        index = (torch.rand(m, rows, device=state.device) * num_present).long()
        return first + there_first.gather(1, index)

    place = draw_starts()
    situation = {name: x[place] for name, x in starts.items()}
    age = torch.zeros(m, rows, device=state.device)  # steps since the rollout began
    steps, values = [], []
    for step in range(args.imagination_horizon + 1):
        mind = decide(state, perceive(state, situation))
        values.append(mind["value"])
        if step == args.imagination_horizon:
            break
        others_probs = predict_actions(state, mind, goal_noise(args, mind["posterior"]))
        action = game.sample(mind["log_probs"].exp())
        joint = torch.cat([action[..., None], game.sample(others_probs)], 2).byte()
        new = imagined_step(state, situation, joint)
        ended = new["ended"]
        mask = (num_present > 0) & (age < state.horizon[:, None])
        steps.append(as_sample(state, mind, joint, new["payoff"], new["board"], ended, mask))
        new["history"] = update_history(state, mind, joint, torch.zeros_like(ended))
        # What has ended, or was cut before this step (which told its last value), begins anew
        restart = ended | ~mask
        place = draw_starts()
        for name, x in starts.items():
            anew = restart.view(*restart.shape, *[1] * (x.dim() - 1))
            situation[name] = torch.where(anew, x[place], new[name])
        age = (age + 1).masked_fill_(restart, 0)
    return {**stack_steps(steps), "value": torch.stack(values, 1)}


# ---- PPO
def make_ppo_batch(args: Args, steps: Tensors, real: bool) -> tuple[dict, dict]:
    """Steps [M, T, E, ...] -> [M, T*E, ...] with GAE's advantages, returns, weights; metrics [M]"""
    value, reward, ended, mask = (steps[name] for name in ("value", "reward", "ended", "mask"))
    go_on = (~ended).float()  # no value is taken from beyond an end
    delta = reward + args.gamma * go_on * value[:, 1:] - value[:, :-1]
    kept = args.gamma * args.gae_lambda * go_on
    gone = ~mask  # there V stands for the rest
    advantages = [torch.zeros_like(reward[:, 0])]
    for t in reversed(range(reward.shape[1])):
        ahead = delta[:, t] + kept[:, t] * advantages[-1]
        advantages.append(ahead.masked_fill_(gone[:, t], 0.0))
    value = value[:, :-1]
    advantage = torch.stack(advantages[:0:-1], 1)  # but for the first
    returns = advantage + value
    names = (*POLICY_READS, "action", "log_prob", "log_probs", "reward")
    batch = {name: steps[name] for name in names}
    batch |= {"advantage": advantage, "returns": returns, "value": value}
    batch["real"] = torch.full_like(mask, real)
    batch["weight"] = mask.float() * (1.0 if real else args.imagined_weight)
    batch["critic_weight"] = batch["weight"] * float(real or args.critic_data == "mixed")

    kind = "real" if real else "imagined"
    samples = mask.flatten(1).sum(1)
    metrics = {f"{kind}/samples": samples, f"{kind}/share": samples / mask[0].numel()}
    for name, x in {"reward": reward, "return": returns, "value": value}.items():
        metrics[f"{kind}/{name}_mean"] = masked_mean(x, mask).where(samples > 0, math.nan)
        metrics[f"{kind}/{name}_std"] = variance(x, mask).sqrt().where(samples > 0, math.nan)
    if real:
        unexplained = variance(returns - value, mask) / variance(returns, mask)
        metrics["losses/explained_variance"] = 1 - unexplained
    return {key: x.flatten(1, 2) for key, x in batch.items()}, metrics


def ppo_loss(args: Args, policy: Stacked, mb: Tensors) -> tuple[Tensor, Tensors]:
    """mb [M, n, ...] -> each learner's loss [M], metrics [M]. Of searched steps the policy learns
    what the search found, by cross-entropy"""
    distilled = mb["real"] & args.distills
    weight = mb["weight"] * ~distilled  # of PPO
    log_probs, value = policy(*(mb[name] for name in POLICY_READS))
    log_ratio = log_probs.gather(2, mb["action"])[..., 0] - mb["log_prob"]
    log_ratio = log_ratio.masked_fill(distilled, 0.0)
    ratio = log_ratio.exp()
    advantage = mb["advantage"] - masked_mean(mb["advantage"], weight)[:, None]
    advantage = advantage / (masked_mean(advantage.square(), weight).sqrt()[:, None] + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if args.distills:
        cross_entropy = -(mb["log_probs"].exp() * log_probs.clamp(min=-50)).sum(2)
        policy_loss = torch.where(distilled, cross_entropy, policy_loss)
    policy_loss = masked_mean(policy_loss, mb["weight"])
    value_error = 0.5 * (value - mb["returns"]).square()
    value_loss = masked_mean(value_error, mb["critic_weight"])
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(2), mb["weight"])
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": masked_mean(ratio - 1 - log_ratio, weight),
        "losses/clipfrac": masked_mean(((ratio - 1).abs() > args.clip_coef).float(), weight),
        "losses/value_loss_real": masked_mean(value_error, mb["weight"] * mb["real"]),
    }
    if args.imagination:
        metrics["losses/value_loss_imagined"] = masked_mean(value_error, mb["weight"] * ~mb["real"])
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy, metrics


def ppo_update(state: TrainState, batch: Tensors) -> Tensors:
    """PPO on samples [M, n, ...] -> metrics [M]"""
    args = state.args
    if state.device.type == "cpu":  # where shapes may change: without rows that count for nobody
        mask = batch["weight"] > 0
        most = max(args.num_minibatches, int(mask.sum(1).max()))
        first = mask.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        learner = torch.arange(len(mask))[:, None]
        batch = {name: x[learner, first] for name, x in batch.items()}
    updates = []
    for _ in range(args.update_epochs):
        order = torch.rand(batch["weight"].shape[1], device=state.device).argsort()
        for index in order.tensor_split(args.num_minibatches):
            minibatch = {name: x.index_select(1, index) for name, x in batch.items()}
            loss, metrics = ppo_loss(args, state.networks["policy"], minibatch)
            updates.append(metrics | {"losses/grad_norm": state.optimizers["policy"].step(loss)})
    return {name: x.detach().mean(0) for name, x in stack_steps(updates, 0).items()}


# ---- One iteration. Metrics are tensors on the device, [M] per learner (games/: [S, N]).
def train_iteration(state: TrainState) -> dict[str, Tensors]:
    """-> its samples. A CUDA graph captures all of it: nothing in it waits for the host"""
    args = state.args
    state.times = []
    record_time(state, "start")
    steps, metrics = rollout(state, state.games)
    searched = {name: x for name, x in steps.items() if name.startswith("search/")}
    metrics |= {name: masked_mean(x, steps["mask"]) for name, x in searched.items()}
    record_time(state, "rollout")

    if args.has_models:
        metrics |= moa_metrics(state, steps)
        state.games.push(steps)
    if args.has_world:
        metrics |= measure_horizon(state, steps)  # on fresh steps, before they are trained on
        metrics |= train_model(state, "world_model", world_model_losses, args.wm_updates)
    if args.has_models:
        metrics |= train_model(state, "opponent_models", opponent_losses, args.subgoal_updates)
    record_time(state, "models")

    batch, real_metrics = make_ppo_batch(args, steps, real=True)
    metrics |= real_metrics
    samples = {"real": batch}
    if args.imagination and args.ppo_real_ratio < 1:
        imagined, imagined_metrics = make_ppo_batch(args, imagine(state), real=False)
        metrics |= imagined_metrics
        samples["imagined"] = imagined
        if args.ppo_real_ratio > 0:
            imagined = {name: torch.cat([batch[name], x], 1) for name, x in imagined.items()}
        batch = imagined
    record_time(state, "imagine")

    metrics |= ppo_update(state, batch)
    record_time(state, "ppo")
    add_metrics(state, metrics)
    return samples


def add_metrics(state: TrainState, metrics: Tensors) -> None:
    """To the sums since the last row, in place, where a CUDA graph looks"""
    for name, x in metrics.items():
        if name not in state.sums:
            shape = list(torch.as_tensor(x).shape)
            wrong = not name.startswith("games/") and shape != list(state.horizon.shape)
            refuse(wrong, f"metric {name} is {shape}, not [M] = {list(state.horizon.shape)}")
            state.sums[name] = torch.zeros(2, *shape, device=state.device)
    flat = torch.cat([x.float().flatten() for x in metrics.values()])
    sizes = [x.numel() for x in metrics.values()]
    for row, x in enumerate((flat.nan_to_num(0.0, 0.0, 0.0), flat.isfinite().float())):
        torch._foreach_add_([state.sums[name][row].flatten() for name in metrics], x.split(sizes))


def read_metrics(state: TrainState) -> dict[str, np.ndarray]:
    """Since the last row, of all ranks: sums of games/, means over iterations of the others"""
    ranks = gather_ranks({name: x.cpu().numpy() for name, x in state.sums.items()})
    iterations = len(ranks) * ranks[0]["real/samples"][1]  # [M]
    metrics = {}
    for name in ranks[0]:
        total, count = sum(of_rank[name] for of_rank in ranks)
        mean = total / np.where(count > 0, count, math.nan)
        metrics[name] = total if name.startswith("games/") else mean
        if name.startswith("losses/") and name != "losses/explained_variance":
            lost = np.flatnonzero(count < iterations).tolist()
            refuse(len(lost) > 0, f"{name} of learners {lost} is no number since the last row")
    unknown = metrics.get("wm/unknown_reward", np.zeros(1)).max() > 1e-3
    refuse(unknown, "a payoff is none of the game's: a bonus belongs into shape_reward")
    return metrics


def record_time(state: TrainState, stage: str) -> None:
    """When a stage ends: host time, or an event that a CUDA graph records at each replay"""
    if state.times is None:
        return
    now = time.perf_counter()
    if state.device.type == "cuda":
        now = torch.cuda.Event(enable_timing=True, external=True)
        now.record()
    state.times.append((stage, now))


@torch.no_grad()
def moa_metrics(state: TrainState, steps: Tensors) -> Tensors:
    """How well MOA predicts fresh actions, on every 8th step, beside their true probabilities"""
    first = min(len(steps["done"][0]), 8) - 1
    steps = {name: x[:, first::8].flatten(1, 2) for name, x in steps.items() if name != "value"}
    mind = perceive(state, steps)
    predicted = predict_actions(state, mind, goal_noise(state.args, mind["posterior"]))
    action = steps["joint"][..., 1:].long()[..., None]
    weight = on_board(state.args.config, mind["seen"]).view(action.shape[:3]).float()
    metrics = {}
    for name, probs in {"moa": predicted, "moa/ceiling": steps["others_probs"]}.items():
        likely = (probs == probs.amax(3, keepdim=True)).float()
        right = (likely / likely.sum(3, keepdim=True)).gather(3, action)[..., 0]  # ties share
        nll = -probs.gather(3, action)[..., 0].clamp(min=1e-9).log()
        metrics[f"{name}/nll"] = masked_mean(nll, weight)
        metrics[f"{name}/top1"] = masked_mean(right, weight)
    return metrics


def log_row(args: Args, metrics: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """Of one seed: of games, means over those that ended; of the rest, over its learners"""
    ended = metrics["games/ended"][seed][0] or math.nan
    returns = metrics["games/return"][seed] / ended
    learns = [name == "learner" for name in game.seats_table(args.seats, len(returns))]
    row = {
        "charts/episodic_return": returns[learns].mean(),
        "charts/length": metrics["games/length"][seed][0] / ended,
        "charts/stag_share": metrics["games/stag"][seed].mean() / ended,
        "charts/hare_share": metrics["games/hare"][seed].mean() / ended,
        "per_agent/return_gap": np.ptp(returns[learns]),
    }
    row |= {f"charts/episodic_return/player_{i}": x for i, x in enumerate(returns)}
    for name, value in metrics.items():
        if name.startswith("games/"):
            continue
        learners = np.split(value, args.num_seeds)[seed]
        known = learners[np.isfinite(learners)]
        row[name] = known.mean() if len(known) > 0 else math.nan
        if name in ("losses/value_loss_real", "moa/nll", "real/samples"):
            tag = name.removeprefix("losses/").replace("/", "_")
            row |= {f"per_agent/{tag}/learner_{i}": x for i, x in enumerate(learners)}
    return {name: float(value) for name, value in row.items()}


# ---- Preparation
def pretrain(state: TrainState, rank: int) -> None:
    """One model per seed learns from rule-based games, or is loaded: its learners copy it"""
    games = state.args.pretraining_games
    args = dataclasses.replace(state.args, num_envs=games, share_parameters=True, compile=False)
    teacher = TrainState(args, rank, state.device, pretraining=True)
    flags = vars(args) | vars(args.config)
    for flag, made_by in PRETRAINED.items():
        path = flags[flag]
        if path is None:
            continue
        saved = load_checkpoint(path, made_by)
        for name, there in saved["must_match"].items():
            here = flags.get(name, there)
            refuse(here != there, f"{path} does not fit: {name} is {there}, here {here}")
        for name, weights in saved["networks"].items():  # of fewer seeds: from the first again
            refuse(name not in teacher.networks, f"{path}: network {name!r} is not used here")
            index = torch.arange(args.num_seeds) % len(next(iter(weights.values())))
            weights = {key: x[index] for key, x in weights.items()}
            copy_nested_(teacher.networks[name].state_dict(), weights, f"{name}.")

    def play():
        return rollout(teacher, teacher.games)[0]

    def learn():
        if args.vae_checkpoint is None:
            train_model(teacher, "opponent_models", opponent_losses, updates=1)
        if args.has_world and args.world_model_checkpoint is None:
            train_model(teacher, "world_model", world_model_losses, updates=1)

    rounds = max(1, min(8, args.pretraining_updates // 10))
    for number in tqdm(range(rounds), desc="pretraining", leave=False, disable=rank > 0):
        teacher.games.push(play())
        falling = 0.5 * (1 + math.cos(math.pi * number / rounds))
        for name, rate in {"opponent_models": 3e-3, "world_model": 2e-3}.items():
            if name in teacher.optimizers:
                teacher.optimizers[name].learning_rate.fill_(rate * falling)
        first, last = (args.pretraining_updates * k // rounds for k in (number, number + 1))
        for update in range(first, last):
            learn()
            if update == 0:
                play = capture(play, teacher)
                learn = capture(learn, teacher)
    copies = len(state.horizon) // args.num_seeds
    for name in [name for name in state.networks if name != "policy"]:
        weights = teacher.networks[name].state_dict().items()
        weights = {key: x.repeat_interleave(copies, 0) for key, x in weights}
        copy_nested_(state.networks[name].state_dict(), weights)
    for _ in range(args.replay_rollouts if state.watched is not None else 0):
        state.watched.push(rollout(state, state.watched)[0])


# ---- CUDA graphs, ranks, checkpoints, logs
def capture(function, state: TrainState):
    """On a GPU: a CUDA graph of what was called once before. Its result stays in place"""
    if state.device.type == "cpu" or not state.args.cudagraphs:
        return function
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(state.env.generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog goes on
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


def make_stages(state: TrainState) -> dict:
    """Of an iteration: functions, or graphs"""
    args = state.args
    stages = {"train": lambda: train_iteration(state)}
    if state.watched is not None:
        stages["watch"] = lambda: state.watched.push(rollout(state, state.watched)[0])
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
        fused = (perceive, decide, predict_actions, update_history, imagined_step, ppo_loss)
        fused += (gumbel_root_action, select_path, path_returns, update_best)
        for function in fused:
            globals()[function.__name__] = torch.compile(function, dynamic=False)
    if state.device.type == "cuda" and args.cudagraphs:
        before = tree_map(torch.clone, state.state_dict())
        with torch.cuda.stream(torch.cuda.Stream()):  # warms up, then everything is put back
            for stage in stages.values():
                stage()
        torch.cuda.synchronize()
        state.load_state_dict(before)
        torch.cuda.empty_cache()
    return {name: capture(stage, state) for name, stage in stages.items()}


def init_ranks(device: torch.device) -> tuple[int, int, torch.device]:
    """Under torchrun: meets the others. -> this rank, how many there are, the device"""
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def gather_ranks(value, everywhere: bool = True) -> list:
    """What each rank has, once all have it; or on the first rank only"""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        if everywhere:
            dist.all_gather_object(values, value)
        else:
            dist.gather_object(value, values if dist.get_rank() == 0 else None)
    return values


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


def save_checkpoint(path: Path, rank: int, state: TrainState, progress: dict) -> None:
    """Of all ranks, by the first"""
    states = gather_ranks(tree_map(lambda x: x.cpu(), state.state_dict()), everywhere=False)
    if rank == 0:
        write_checkpoint(path, {"states": states, **progress})
    gather_ranks(None)  # nobody goes on, or ends, before it is written


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


def log(folder: Path, writer: SummaryWriter, step: int, row: dict, samples: dict) -> None:
    """A row, and histograms of samples. JSON has no NaN: null"""
    finite = {name: value for name, value in row.items() if math.isfinite(value)}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"steps": step, **dict.fromkeys(row), **finite}) + "\n")
        for name, value in finite.items():
            writer.add_scalar(name, value, step)
        for kind, batch in samples.items():
            mask = batch["weight"] > 0
            for name in ("reward", "returns", "value") if mask.any() else ():
                writer.add_histogram(f"{kind}/{name}", batch[name][mask].cpu(), step)


# ---- Main
def main(args: Args) -> None:
    start = time.monotonic()
    rank, num_ranks, device = init_ranks(torch.device(args.device))
    refuse(args.num_envs % num_ranks > 0, f"--num-envs must be a multiple of {num_ranks} ranks")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    flags = dataclasses.asdict(args)
    share = {"num_envs": args.num_envs // num_ranks}  # two samples: of games of either kind
    for name in ("subgoal_batch_size", "wm_batch_size"):
        share[name] = max(math.ceil(flags[name] / num_ranks), min(2, flags[name]))
    state = TrainState(dataclasses.replace(args, **share), rank, device)
    iteration = 0
    seconds = 0.0
    if args.resume is not None:
        checkpoint = load_checkpoint(args.resume, FORMAT)
        ranks = len(checkpoint["states"])
        refuse(ranks != num_ranks, f"--resume: the run has {ranks} ranks, not {num_ranks}")
        state.load_state_dict(checkpoint["states"][rank])
        iteration = checkpoint["iteration"]
        seconds = checkpoint["seconds"]
        folder = checkpoint["folder"]
        folders = [folder, *(folder.parent / name for name in checkpoint["folders"][1:])]
    else:
        if args.pretrains:
            pretrain(state, rank)
        folders = gather_ranks(make_folders(args, args.method) if rank == 0 else [])[0]
    stages = make_stages(state)

    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the iteration is finished and saved
        signal.signal(number, lambda number, _: stop.append(number))
    steps_each = args.num_envs * args.num_steps
    num_iterations = math.ceil(args.total_timesteps / steps_each)
    step = iteration * steps_each
    writers = [open_log(args, folder, step) for folder in folders] if rank == 0 else []
    ready = time.monotonic() - start
    total = num_iterations * steps_each
    bar = tqdm(initial=step, total=total, unit="step", unit_scale=True, disable=rank > 0)
    if rank == 0:
        learners = f"{len(state.horizon)} learners, memory {args.history_decay}"
        print(f"{folders[0]}: {learners}, ready after {ready:.1f} s on {device}")
    began = time.monotonic() - seconds
    last_save = time.monotonic()
    last = iteration >= num_iterations
    while not last:
        decay = 0.9 * args.anneal_lr * iteration / num_iterations
        learning_rate = args.learning_rate * (1 - decay)
        state.optimizers["policy"].learning_rate.fill_(learning_rate)
        state.eps.fill_(args.hindsight_eps * max(0.0, 1 - 2 * iteration / num_iterations))
        if "watch" in stages and iteration % args.replay_rollouts == 0:
            stages["watch"]()
        samples = stages["train"]()
        iteration += 1
        overdue = time.monotonic() - last_save >= args.save_seconds
        ranks = gather_ranks((bool(stop), overdue))
        last = any(stopped for stopped, _ in ranks) or iteration == num_iterations
        save_due = last or ranks[0][1]
        log_due = iteration % args.log_every == 0 or iteration == num_iterations
        if not (log_due or save_due):
            continue

        metrics = read_metrics(state)
        step = iteration * steps_each
        seconds = time.monotonic() - began
        if log_due:
            for x in state.sums.values():
                x.zero_()
            speed = {"time/SPS": step / seconds, "charts/learning_rate": learning_rate}
            speed |= {"time/training": seconds, "time/ready": ready}
            for (_, begin), (stage, end) in itertools.pairwise(state.times):
                passed = end - begin if device.type == "cpu" else begin.elapsed_time(end) / 1000
                speed[f"time/{stage}"] = speed.get(f"time/{stage}", 0.0) + passed
            rows = [log_row(args, metrics, seed) | speed for seed in range(args.num_seeds)]
            shown = samples if 10 * iteration % num_iterations < 10 * args.log_every else {}
            for i, writer in enumerate(writers):
                of_seed = tree_map(lambda x, i=i: x.chunk(args.num_seeds)[i], shown)
                log(folders[i], writer, step, rows[i], of_seed)
            mean_return = np.mean([row["charts/episodic_return"] for row in rows])
            bar.set_postfix_str(f"return {mean_return:.3f}", refresh=False)
            bar.update(step - bar.n)
        if save_due:
            progress = {"args": flags, "iteration": iteration}
            progress |= {"seconds": seconds, "folders": [folder.name for folder in folders]}
            save_checkpoint(folders[0] / "checkpoint.pt", rank, state, progress)
            last_save = time.monotonic()
        began = time.monotonic() - seconds  # what is logged and saved is no training
    bar.close()
    if rank == 0:
        folder = os.path.relpath(folders[0])
        print(f"{seconds:.1f} s of training. What comes next:")
        if iteration < num_iterations:
            print(f"python {sys.argv[0]} --resume {folder}")
        print(f"python evaluation/evaluate.py {folder}\npython evaluation/inspector.py {folder}")
        print(f"tensorboard --logdir {folder}")
    if stop:
        sys.exit(128 + stop[0])


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
    if dist.is_initialized():
        dist.destroy_process_group()
