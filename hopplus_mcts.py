"""HOP+ on Stag Hunt, acting by search: the hunters of hopplus_ppo.py look ahead before they act. Thousands of trees
grow at once on the device, and the policy learns from what the search finds. See `diff hopplus_ppo.py hopplus_mcts.py`.

    python hopplus_mcts.py                                        # HOP+ with tree search on 4x4
    python hopplus_mcts.py --method hop                           # HOP as published
    python hopplus_mcts.py --root gumbel --num-simulations 32     # another root
    python hopplus_mcts.py --planner one-step                     # look one step ahead (none: act by the policy)
    python hopplus_mcts.py --resume runs/RUN/checkpoint.pt
    torchrun --nproc-per-node 8 hopplus_mcts.py --num-envs 2048   # the games split over 8 GPUs
    python evaluation/evaluate.py runs/RUN -- --planner none      # frozen; also adapt.py

Axes: S seeds, E games per seed, B = S*E games, N players, P prey, M learners, T steps (in a search: trees), A actions,
D subgoal, K co-players, n rows of any kind. What a learner reads or predicts about players is in its ego order: itself
first. A board is uint8 [N + P]: the cell of each player and of each prey, H*W for what is not there.
The loop on one page is `train_iteration`, near the end: begin there. `docs/hopplus_mcts.md` explains every metric,
`docs/editing.md` shows five edits.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import (
    HUNT_STAG,
    NUM_ACTIONS,
    STAY,
    Count,
    Fraction,
    NonNegative,
    Positive,
    StagHuntConfig,
    StagHuntEnv,
    Whole,
    refuse,
)

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from tqdm import tqdm

FORMAT = "hopplus_mcts.py 17"  # of a checkpoint
PRETRAINED = {  # flag -> the format of its checkpoint, the networks that it holds
    "vae_checkpoint": ("pretrain_vae.py 10", ("prior", "inference", "moa")),
    "world_model_checkpoint": ("pretrain_world_model.py 10", ("world",)),
}
MAY_CHANGE = ("total_timesteps", "log_every", "save_seconds")  # when a run is resumed
PICTURES = 10  # how often in a run histograms go to TensorBoard
MOA_STRIDE = 8  # MOA is measured on every 8th step
PER_LEARNER = {  # metric -> its name in per_agent/
    "moa/nll": "moa_nll",
    "losses/value_loss_real": "value_loss_real",
    "losses/explained_variance": "explained_variance",
}

# ---- Arguments. The class defaults are those of HOP+ on a GPU; DEFAULTS has the others.


@dataclasses.dataclass
class RunArgs:
    exp_name: str = Path(__file__).stem  # first part of the run's name
    method: Literal["ppo", "ppo-omg", "hopplus", "hopplus-mcts", "hop"] = "hopplus-mcts"
    """a set of flags: plain PPO; with subgoals and memory; with these and imagination, or search;
    HOP"""
    seed: Whole = 1
    """seed of the first experiment; the others count up, but are not what --seed 2, 3, ... alone
    would be"""
    num_seeds: Count = 1
    """S, complete experiments side by side, each with its own weights and TensorBoard run"""
    total_timesteps: Count = 2_000_000  # env steps per seed
    share_parameters: bool = False  # one set of networks for all learners of a seed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"  # folder in which the runs' folders are made
    resume: str | None = None
    """continue the run of this checkpoint or run folder, bit for bit, on the same kind of device,
    with its flags; a larger --total-timesteps extends it, --log-every and --save-seconds may change
    too"""
    log_every: Count = 5  # iterations between two rows in the logs
    save_seconds: NonNegative = 60.0
    """seconds between two checkpoints; 0: one after each iteration"""


@dataclasses.dataclass
class PPOArgs:
    num_envs: Count = 256  # E, games per seed
    num_steps: Count = 32  # T, steps of each game per iteration
    learning_rate: Positive = 1e-3
    """Adam's step size; without imagination and search large ones often end with hares"""
    anneal_lr: bool = True  # let it fall linearly to a tenth
    policy_hidden: Count = 128
    """width of the policy's encoder, of the layers that actor and critic share and of their own"""
    update_epochs: Count = 4  # passes over each batch
    num_minibatches: Count = 4  # minibatches per pass
    gamma: Fraction = 0.99  # discount
    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation (1: Monte Carlo returns)"""
    clip_coef: Positive = 0.2  # clip range of the ratio
    ent_coef: NonNegative = 0.03  # weight of the entropy
    vf_coef: NonNegative = 0.5  # weight of the value loss
    max_grad_norm: Positive = 0.5  # clip each learner's gradient to this norm (the models': 1)


@dataclasses.dataclass
class OpponentArgs:
    subgoals: Literal["none", "actions", "inferred", "hop"] = "inferred"
    """what the policy reads about each co-player: nothing; its next action as predicted by MOA, the
    model of the others' actions, here without subgoals; its subgoal, inferred from what it did;
    nothing, and MOA reads HOP's belief"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax"""
    goal_dim: Count = 16  # D, the size of a subgoal (discrete: the number of categories)
    subgoal_hidden: Count = 64  # width of the subgoal networks and the MOA
    subgoal_selection: Literal["conservative", "optimistic", "final"] = "conservative"
    """which state tells, in hindsight, what a co-player wanted: of the next ones that of lowest or
    of highest value to the learner; or the last before the co-player left"""
    subgoal_horizon: Count = 5  # how many states ahead that state is looked for
    hindsight_eps: Fraction = 0.5
    """share of MOA's training that reads hindsight subgoals, at the start; falls to 0 halfway"""
    kl_coef: NonNegative = 1e-3
    """weight of the KL from the inferred subgoal to the one in hindsight, and in pretraining of
    the KL from the subgoals of states to a standard normal (0.01: these collapse)"""
    memory_discount: Fraction = 0.9
    """what is left of the history of each co-player at the start of the next game (0: nothing);
    above 1 - history_reset_prob it outgrows what training shows"""
    history_reset_prob: Fraction = 0.1
    """how often, in training, all of it is reset after a game: else nobody learns to play with
    strangers"""
    subgoal_learning_rate: Positive = 1e-3
    """subgoal inference and MOA: Adam's step size (in pretraining 3e-3, falling)"""
    subgoal_updates: Whole = 4
    """subgoal inference and MOA: updates per iteration (0: do not train them)"""
    subgoal_batch_size: Count = 64
    """subgoal inference and MOA: windows of --num-steps steps per update and learner"""
    vae_checkpoint: str | None = None
    """start the subgoal networks and MOA from this checkpoint of pretrain_vae.py instead of
    pretraining here"""
    pretraining_updates: Whole = 800
    """updates of each model on rule-based games before the first iteration"""
    pretraining_games: Count = 1024  # rule-based games at a time, per seed
    offline_ratio: Fraction = 0.5
    """share of the models' samples that are games of rule-based players, played beside the
    learners' own"""


@dataclasses.dataclass
class WorldModelArgs:
    wm_hidden: Count = 128  # width of the hidden layers
    wm_learning_rate: Positive = 1e-3  # Adam's step size (in pretraining 2e-3, falling)
    wm_updates: Whole = 4  # updates per iteration (0: do not train it)
    wm_batch_size: Count = 1024  # transitions per update and learner
    world_model_checkpoint: str | None = None
    """start from this checkpoint of pretrain_world_model.py instead of pretraining here"""
    replay_rollouts: Count = 4
    """the last iterations that the models learn and imagine from; as often they watch new
    rule-based games"""


@dataclasses.dataclass
class ImaginationArgs:
    imagination: bool = True  # learn from imagined rollouts too
    imagination_horizon: Count = 16  # most steps of an imagined rollout
    trust_exact_match: Fraction = 0.99
    """adaptive horizon: k steps are imagined if this share of k-step predictions is exact (0:
    always all)"""
    ppo_real_ratio: Fraction = 0.5
    """share of real ones among the samples that PPO learns from (1: plain PPO)"""
    critic_data: Literal["real", "mixed"] = "mixed"
    """what the critic learns from: real samples, or imagined ones too"""
    imagined_weight: NonNegative = 1.0  # weight of an imagined sample beside a real one
    watched_starts: Fraction = 0.5
    """share of the imagined rollouts that start in games of rule-based players and go on with them as
    co-players, so that the policy learns to answer goals that self-play never shows (none with
    --offline-ratio 0)"""


@dataclasses.dataclass
class SearchArgs:
    planner: Literal["mcts", "one-step", "none"] = "mcts"
    """how the learners act: by tree search; by looking one step ahead; by their policy"""
    root: Literal["puct", "gumbel"] = "puct"
    """pUCT everywhere; or Gumbel MuZero, noise and halving at the root and the improved policy
    below it"""
    num_simulations: Count = 16  # simulations per tree
    num_trees: Count = 2
    """trees per decision, each with other subgoals of the co-players; their Q are averaged"""
    puct: NonNegative = 1.0
    """pUCT's weight of the policy's priors, with Q in units of the highest payoff"""
    q_temperature: Positive = 50.0
    """beta: the search plays softmax(beta * Q + search_prior * log policy), with Q in the same
    units"""
    search_prior: NonNegative = 1.0  # see there; the Gumbel root always has 1
    max_depth: Count = 32  # deepest a tree may grow
    search_model: Literal["env", "world-model"] = "world-model"
    """the game's own rules, or the learned world model, whatever its trusted horizon"""
    infer_in_tree: bool = False
    """infer the co-players' subgoals anew at every node, instead of once at the root"""
    policy_loss: Literal["distill", "ppo"] = "distill"
    """what the policy learns from steps that were searched: cross-entropy to the search's policy,
    or PPO"""


@dataclasses.dataclass
class SpeedArgs:
    cudagraphs: bool = True  # on a GPU: replay whole iterations as CUDA graphs
    compile: bool = False
    """on a GPU: fuse game, networks and losses with torch.compile; takes a minute at the start"""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """on a GPU: matrix products in float32; in tf32; in bfloat16 (the models' training stays in
    tf32)"""


@dataclasses.dataclass
class Args(
    RunArgs,
    game.SeatFlags,
    PPOArgs,
    OpponentArgs,
    WorldModelArgs,
    ImaginationArgs,
    SearchArgs,
    SpeedArgs,
):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {  # the boxes of --help
    "run": RunArgs,
    "game": StagHuntConfig,
    "seats": game.SeatFlags,
    "ppo": PPOArgs,
    "opponent_model": OpponentArgs,
    "world_model": WorldModelArgs,
    "imagination": ImaginationArgs,
    "search": SearchArgs,
    "speed": SpeedArgs,
}
PPO = {"subgoals": "none", "imagination": False, "memory_discount": 0.0, "planner": "none"}
PPO_OMG = {"imagination": False, "planner": "none"}
SEARCH = {"imagination": False, "imagination_horizon": 8, "total_timesteps": 600_000}
HOP = {
    **SEARCH,
    "subgoals": "hop",
    "goal_kind": "discrete",
    "goal_dim": 2,
    "num_trees": 5,
    "search_model": "env",
    "search_prior": 0.0,
    "pretraining_updates": 0,
    "offline_ratio": 0.0,
    "gae_lambda": 1.0,
    "ent_coef": 0.0,
    "history_reset_prob": 0.0,
}
CALM_PPO = {  # with fewer games or larger steps 8x8 may end with hares
    "num_envs": 1024,
    "learning_rate": 2e-4,
    "total_timesteps": 4_000_000,
}
ON_CPU = {"policy_hidden": 64, "log_every": 1, "save_seconds": 20.0}  # what two cores do well
PPO_ON_CPU = {**ON_CPU, "total_timesteps": 350_000, "update_epochs": 3}
PPO_LARGE_ON_CPU = {**CALM_PPO, "update_epochs": 4, "total_timesteps": 3_500_000}
MODELS_ON_CPU = {
    "subgoal_updates": 1,
    "subgoal_batch_size": 8,
    "wm_updates": 2,
    "wm_batch_size": 256,
    "pretraining_updates": 200,
    "pretraining_games": 64,
    "num_simulations": 8,
    "num_trees": 1,
}
IMAGINATION_ON_CPU = {  # few games, much imagined
    "num_envs": 64,
    "total_timesteps": 120_000,
    "learning_rate": 2e-3,
    "num_minibatches": 16,
    "watched_starts": 0.85,
}
SEARCH_ON_CPU = {
    **ON_CPU,
    **MODELS_ON_CPU,
    "num_envs": 64,
    "total_timesteps": 40_000,
    "subgoal_updates": 2,
}
DEFAULTS = {  # what differs from the class defaults
    ("ppo", "cuda"): {**PPO, **CALM_PPO},
    ("ppo-omg", "cuda"): {**PPO_OMG, **CALM_PPO},
    ("hopplus", "cuda"): {"planner": "none"},
    ("hopplus-mcts", "cuda"): SEARCH,
    ("hop", "cuda"): HOP,
    ("ppo", "cpu"): {**PPO, **PPO_ON_CPU, **MODELS_ON_CPU},
    ("ppo-omg", "cpu"): {**PPO_OMG, **PPO_ON_CPU, **MODELS_ON_CPU},
    ("hopplus", "cpu"): {
        **ON_CPU,
        **MODELS_ON_CPU,
        **IMAGINATION_ON_CPU,
        "planner": "none",
    },
    ("hopplus-mcts", "cpu"): {**SEARCH, **SEARCH_ON_CPU},
    ("hop", "cpu"): {**HOP, **SEARCH_ON_CPU, "num_trees": 5, "pretraining_updates": 0},
}
LARGE_BOARD = {  # and where there are more than 16 cells
    ("hopplus", "cuda"): {"total_timesteps": 4_000_000},
    ("ppo", "cpu"): PPO_LARGE_ON_CPU,
    ("ppo-omg", "cpu"): PPO_LARGE_ON_CPU,
    ("hopplus", "cpu"): {"total_timesteps": 350_000},
}
METHODS = tuple(method for method, device in DEFAULTS if device == "cpu")


def make_args(method: str = "hopplus-mcts", device: str = "auto", **changes) -> Args:
    """Complete flags; with `resume` those of the run that goes on"""
    if changes.get("resume") is not None:
        path = game.find_checkpoint(changes["resume"], "--resume")
        saved = game.load_checkpoint(path, FORMAT)["args"]
        return load_args(path, saved, device=device, **changes)
    refuse(method not in METHODS, f"--method must be one of {', '.join(METHODS)}, not {method}")
    kind = game.resolve_device(device).type
    config = changes.get("config", StagHuntConfig())
    defaults = DEFAULTS[method, kind]
    if config.num_cells > 16:
        defaults = defaults | LARGE_BOARD.get((method, kind), {})
    return Args(**{"method": method, "device": device, **defaults, **changes})


def describe_defaults(args: Args) -> str:
    """For --help: whose defaults these are"""
    if args.resume is not None:
        return "The defaults are the flags of the resumed run."
    kind = game.resolve_device(args.device).type
    board = f"{args.config.height}x{args.config.width}"
    return f"The defaults are those of --method {args.method} on {board} on {kind}."


def load_args(path: str | Path, saved: dict, **changes) -> Args:
    """The flags of a checkpoint, with changes"""
    try:
        return Args(**saved | changes | {"config": StagHuntConfig(**saved["config"])})
    except TypeError as error:
        raise game.UserError(f"{path}: its flags are not those of this script: {error}") from error


def parse_args(words: list[str]) -> Args:
    early = game.early_flags(words, method="hopplus-mcts", device="auto", resume=None, height="4", width="4")
    config = game.early_board(early.pop("height"), early.pop("width"))
    args = make_args(config=config, **early)
    return game.parse(Args, GROUPS, args, words, describe_defaults(args))


def needs_models(args: Args) -> bool:
    """Do the learners infer subgoals or predict actions?"""
    return args.imagination or args.planner != "none" or args.subgoals != "none"


def needs_world_model(args: Args) -> bool:
    searches_in_it = args.planner != "none" and args.search_model == "world-model"
    return args.imagination or searches_in_it


def validate(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.redraw_prob(args.redraw)
    game.population_names(args.population)
    table = game.seats_table(args.seats, config.num_players)
    refuse("learner" not in table, f"--seats {args.seats}: nobody learns")
    too_few = args.num_steps * args.num_envs < args.num_minibatches
    refuse(too_few, "--num-minibatches exceeds a learner's samples")
    refuse(config.num_cells > 255, f"--height, --width: a board has up to 255 cells, not {config.num_cells}")
    refuse(config.final_time > 255, f"--final-time is up to 255, not {config.final_time}")
    one_category = args.goal_kind == "discrete" and args.goal_dim < 2
    refuse(one_category, "--goal-kind discrete needs --goal-dim 2 or more")
    if needs_models(args):
        both = 0 < args.offline_ratio < 1  # games of either kind in a batch
        refuse(args.subgoal_hidden < 2, "--subgoal-hidden must be 2 or more")
        batch_sizes = ["subgoal_batch_size"]
        if needs_world_model(args):
            batch_sizes.append("wm_batch_size")
        for name in batch_sizes:
            too_small = both and getattr(args, name) < 2
            refuse(too_small, f"--offline-ratio needs {game.flag(name)} 2 or more, or 0 or 1")
    else:
        refuse(args.vae_checkpoint is not None, "--vae-checkpoint needs --subgoals inferred, --imagination or search")
    if args.imagination:
        only_imagined = args.ppo_real_ratio == 0 and args.critic_data == "real"
        refuse(only_imagined, "--ppo-real-ratio 0 needs --critic-data mixed")
        too_far = args.imagination_horizon > args.num_steps
        refuse(too_far, f"--imagination-horizon is measured on --num-steps {args.num_steps}")
    if not needs_world_model(args):
        unread = args.world_model_checkpoint is not None
        refuse(unread, "--world-model-checkpoint needs --imagination or search with it")
    if args.planner != "none":
        untrained = args.root == "gumbel" and args.policy_loss == "ppo"
        refuse(untrained, "--root gumbel needs --policy-loss distill")
        too_small = args.gamma**args.max_depth < 1e-30
        refuse(too_small, "--gamma is too small for this --max-depth")
    if args.subgoals == "hop":
        two = (args.goal_kind, args.goal_dim) == ("discrete", 2)
        refuse(not two, "--subgoals hop needs --goal-kind discrete --goal-dim 2")
        refuse(args.imagination, "--subgoals hop is not for --imagination")
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


def goal_size(args: Args) -> int:
    """How many numbers the policy reads about each co-player"""
    return {"none": 0, "hop": 0, "actions": NUM_ACTIONS}.get(args.subgoals, args.goal_dim)


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


class ActorCritic(nn.Module):
    """pi(a | own view of the board, clock, last joint action, subgoals of the co-players) and V of
    the same"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.policy_hidden
        entities = config.num_players + config.num_prey
        state_size = 1 + NUM_ACTIONS * config.num_players  # clock, last joint action
        goals = goal_size(args) * (config.num_players - 1)
        self.sizes = [entities, config.num_wall_cells, state_size, goals]
        inputs = hidden + state_size + goals
        self.padding = -inputs % 8  # as in BoardEncoder
        self.encoder = BoardEncoder(config, hidden)
        self.trunk = mlp(inputs + self.padding, hidden, hidden, gain=math.sqrt(2))
        self.both = Linear(hidden, 2 * hidden, math.sqrt(2))  # half for the actor, half for the critic
        self.actor = Linear(hidden, NUM_ACTIONS, 0.01)
        self.critic = Linear(hidden, 1)

    def features(self, x):
        """x [M, n, i] (see policy_inputs) -> features of the state [M, n, _], subgoals [M, n,
        K*D]"""
        board, walls, state, goals = x.split(self.sizes, 2)
        state = F.pad(state, (self.padding, 0))
        return torch.cat([self.encoder(board.long(), walls), state], 2), goals

    def heads(self, features, goals):
        """-> what the actor's and the critic's last layer read, [M, n, hidden] each"""
        x = self.trunk(torch.cat([features, goals], 2)).relu_()
        return self.both(x).relu_().chunk(2, 2)

    def value(self, features, goals):
        """-> [M, n]"""
        _, x = self.heads(features, goals)
        return self.critic(x).squeeze(2)

    def forward(self, x, legal):
        """x [M, n, i], legal bool [M, n, 7] -> log-probabilities [M, n, 7], values [M, n]"""
        actor_x, critic_x = self.heads(*self.features(x))
        logits = self.actor(actor_x).float()
        log_probs = logits.masked_fill(~legal, -1e9).log_softmax(2)
        return log_probs, self.critic(critic_x).squeeze(2)


def policy_inputs(args: Args, board, walls, clock, last_joint, goals):
    """The learner's own view [M, n, N + P], [M, n, _], [M, n], [M, n, N], [M, n, K*D] -> [M, n,
    i]"""
    acts = F.one_hot(last_joint.long(), NUM_ACTIONS).flatten(2)
    acts = acts * (args.subgoals != "hop")  # it reads the state alone
    parts = (board, walls, clock[..., None], acts, goals)
    dtype = inference_dtype(args, board.device)
    return torch.cat([x.to(dtype) for x in parts], 2)  # cells, up to 255, are exact in bfloat16


def inference_dtype(args: Args, device) -> torch.dtype:
    return torch.bfloat16 if args.precision == "bf16" and device.type == "cuda" else torch.float32


class Networks(NamedTuple):
    """What M learners own, one Stacked each; None where a flag switches it off"""

    policy: Stacked
    prior: Stacked | None = None  # f_psi
    inference: Stacked | None = None  # q_phi
    moa: Stacked | None = None
    moa_prior: Stacked | None = None  # only in pretraining: MOA given f_psi's subgoal
    world: Stacked | None = None

    def present(self) -> dict[str, Stacked]:
        return {name: network for name, network in self._asdict().items() if network is not None}


def make_networks(args: Args, seeds: list[int], device, pretraining: bool = False) -> Networks:
    """One of each network per entry of `seeds` [M]"""
    config = args.config
    dtype = inference_dtype(args, device)
    kinds = {}
    if needs_models(args):
        kinds |= {"prior": SubgoalPrior, "inference": SubgoalInference, "moa": ActionModel}
    if needs_models(args) and pretraining:
        kinds["moa_prior"] = ActionModel
    if needs_world_model(args):
        kinds["world"] = WorldModel
    networks = {"policy": Stacked(lambda: ActorCritic(config, args), seeds, device, dtype, dtype)}
    for name, kind in kinds.items():
        number = Networks._fields.index(name)
        network_seeds = [10_000 * seed + 1000 * number for seed in seeds]
        networks[name] = Stacked(functools.partial(kind, config, args), network_seeds, device, dtype)
    return Networks(**networks)


# ---- Belief about co-players, on a board that is real or imagined


def entity_views(env: StagHuntEnv, board, walls, num_views: int | None = None):
    """board uint8 [M, n, N + P], walls [M, n, _] -> as each player sees it (num_views: only the
    first ones): boards int64 [M, n, N, N + P], walls float [M, n, N, _], legal actions bool [M, n,
    N, 7]"""
    config = env.config
    players = config.num_players
    seen = board.long()[..., env.view_order[:num_views]]  # [M, n, views, N + P]
    cell = seen[..., 0]
    present = cell < config.num_cells
    here = cell.clamp(max=config.num_cells - 1)
    target = env.target[here].flatten(2)
    free = walls.expand(-1, -1, config.num_cells).gather(2, target).view(*here.shape, NUM_ACTIONS) == 0
    moves = (env.possible[here] & free)[..., : STAY + 1]
    on_stag, on_hare = (cell[..., None] == seen[..., players:]).split([config.num_stags, config.num_hares], 3)
    hunts = torch.stack([on_stag.any(3), on_hare.any(3)], 3)
    legal = torch.cat([moves, hunts], 3) & present[..., None] | env.is_stay
    walls = walls[:, :, None].expand(-1, -1, seen.shape[2], -1).float()
    return seen, walls, legal


class OpponentBelief(NamedTuple):
    """What a learner holds about its K co-players at one step. Of n*K rows, row i*K + k is about
    co-player k in row i"""

    goals: torch.Tensor  # [M, n, K*D] for the policy
    params: torch.Tensor  # [M, n*K, _] q_phi's distributions
    features: torch.Tensor  # [M, n*K, hidden] of q_phi's encoder (HOP: goal_action_probs)
    board: torch.Tensor  # [M, n*K, N + P] as the co-player sees it
    walls: torch.Tensor  # [M, n*K, _]
    legal: torch.Tensor  # bool [M, n*K, 7] its legal actions
    present: torch.Tensor  # bool [M, n, K] on the board


def infer_opponents(args: Args, env, networks: Networks, views: tuple, clock, history) -> OpponentBelief:
    """views [M, n, N, ...] (see entity_views), clock [M, n], history [M, n, K, 2 * hidden]"""
    m, n, k = history.shape[:3]
    board, walls, legal = co_players(views)
    history = history.flatten(1, 2).float()
    if args.subgoals == "hop":
        features = goal_action_probs(networks, board, walls, clock, legal)
        params = bayes_posterior(history)
    else:
        features = networks.inference(board, walls, method="encoder")
        params = networks.inference(features, history)
    goals = goal_mean(args.goal_kind, params)
    if args.subgoals == "actions":
        goals = networks.moa(board, walls, clock.repeat_interleave(k, 1), goals, legal).exp()
    return OpponentBelief(
        goals=goals.reshape(m, n, -1)[..., : k * goal_size(args)],
        params=params,
        features=features,
        board=board,
        walls=walls,
        legal=legal,
        present=(board[..., 0] < env.config.num_cells).view(m, n, k),
    )


def co_players(views: tuple) -> tuple:
    """views [M, n, N, ...] -> those of the co-players [M, n*K, ...]"""
    return tuple(x[:, :, 1:].flatten(1, 2) for x in views)


def predict_actions(args: Args, networks: Networks, belief: OpponentBelief, clock, noise):
    """clock [M, n], noise [M, n*K, D] -> MOA's log-probabilities of what each co-player does next
    [M, n, K, 7]"""
    k = belief.present.shape[2]
    if args.subgoals == "actions":
        return belief.goals.unflatten(2, (k, -1)).log()
    goal = sample_goal(args.goal_kind, belief.params, noise)
    clock = clock.repeat_interleave(k, 1)
    log_probs = networks.moa(belief.board, belief.walls, clock, goal, belief.legal)
    return log_probs.unflatten(1, (-1, k))


def update_history(args: Args, env, networks: Networks, belief: OpponentBelief, joint, history, done):
    """history [M, n, K, 2 * hidden] after joint action [M, n, N]; after a game's end what the next
    one starts from"""
    if args.subgoals == "hop":
        return add_evidence(args, belief, joint, history, done)
    seen = joint.long()[..., env.ego[1:]].flatten(1, 2)  # in each co-player's own ego order
    event = networks.inference(belief.features, seen, method="event")
    event = event.unflatten(1, history.shape[1:3]) * belief.present[..., None]
    return add_event(history, event, done[..., None, None], history_decay(args))


def add_event(history, event, done, discount):
    """[..., 2 * hidden], [..., hidden], bool [..., 1] -> the history after it; `discount`: what a
    game's end leaves"""
    now, before = history.chunk(2, -1)
    now = now + event
    next_game = torch.cat([torch.zeros_like(now), discount * (before + now)], -1)
    return torch.where(done, next_game, torch.cat([now, before], -1))


def history_after_game(args: Args, history, discount):
    """What a game's end leaves of a history [..., 2 * hidden]: what the next game starts from"""
    if args.subgoals == "hop":  # the prior, as count_hunts left it
        return F.pad(history[..., 2:] * (discount > 0), (2, 0))
    done = torch.ones_like(history[..., :1], dtype=torch.bool)
    return add_event(history, 0.0, done, discount)


def history_decay(args: Args) -> float:
    """What is left of a history in the next game: nothing if that may be with somebody else"""
    redrawn = game.redraw_prob(args.redraw) == 1 and "mixed" in (args.seats or "")
    return 0.0 if redrawn else args.memory_discount


def goal_action_probs(networks: Networks, board, walls, clock, legal):
    """HOP: boards as co-players see them [M, n*K, ...], clock [M, n] -> MOA's log-probabilities of
    what each does in pursuit of a stag and of a hare, [M, n*K, 2 * 7]"""
    clock = clock.repeat_interleave(board.shape[1] // clock.shape[1], 1)
    twice = [x.repeat_interleave(2, 1) for x in (board, walls, clock, legal)]
    goal = torch.eye(2, device=clock.device).repeat(*board.shape[:2], 1)
    log_probs = networks.moa(*twice[:3], goal, twice[3])
    return log_probs.view(*board.shape[:2], -1)


def bayes_posterior(history):
    """HOP: history [..., 4] -> log-probabilities of stag and hare: how well each explains what was
    done in this game, and how often each was taken in those before"""
    evidence, before = history.chunk(2, -1)
    prior = (0.5 + before).clamp(min=1e-6)
    return (evidence + prior.log()).log_softmax(-1)


def add_evidence(args: Args, belief: OpponentBelief, joint, history, done):
    """HOP's update_history: history [M, n, K, 4]"""
    log_probs = belief.features.view(*belief.present.shape, 2, NUM_ACTIONS)
    action = joint.long()[..., 1:, None, None].expand(*log_probs.shape[:-1], 1)
    evidence = log_probs.gather(4, action)[..., 0].clamp(min=-10)
    evidence = evidence - evidence.amax(-1, keepdim=True)  # for or against, not how likely it was
    seen = history + F.pad(evidence, (0, 2))
    history = torch.where(belief.present[..., None], seen, history)
    next_game = history_after_game(args, history, history_decay(args))
    return torch.where(done[..., None, None], next_game, history)


def count_hunts(args: Args, joint, has_exited, history):
    """HOP: b0 = alpha b0 + (1 - alpha) 1[goal] for co-players that leave with their prey; a history
    holds b0 - 0.5"""
    hunts = [joint == game.HUNT_STAG, joint == game.HUNT_HARE]
    goal = torch.stack(hunts, -1)[..., 1:, :].float()
    change = (1 - args.memory_discount) * (goal - 0.5 - history[..., 2:]) * has_exited[..., 1:, None]
    return history + F.pad(change, (2, 0))


# ---- Search: T trees at once in flat tensors, one per learner, game and goal sample. Only the
# learner's own actions branch. All trees walk in step: a path that is over repeats its last node,
# and what it writes goes to a spare node. So shapes are static, and nothing waits for the host.

ILLEGAL = -1e9


class Position(NamedTuple):
    """What a node stands for, [T, ...] (in a tree: [T, nodes, ...]; before: [M, E, ...]), in the
    learner's ego order"""

    board: torch.Tensor  # uint8 [N + P]
    time: torch.Tensor
    first_hunt: torch.Tensor
    last_joint: torch.Tensor  # [N]
    history: torch.Tensor  # [K, _] of each co-player; in a tree [K, 0] without --infer-in-tree


class Tree(NamedTuple):
    """Node 0 is the root, simulation k adds node k + 1, the last node is the spare one"""

    visits: torch.Tensor  # [T, nodes, A] of each edge
    returns: torch.Tensor  # [T, nodes, A] their sum
    log_policy: torch.Tensor  # [T, nodes, A], ILLEGAL where an action is
    child: torch.Tensor  # int64 [T, nodes, A] where the edge leads (0: nowhere yet)
    value: torch.Tensor  # [T, nodes]
    reward: torch.Tensor  # [T, nodes] on the way here
    ended: torch.Tensor  # bool [T, nodes]
    best: torch.Tensor  # int64 [T, nodes] the action to try next
    best_child: torch.Tensor  # int64 [T, nodes] where it leads; the same node where the path ends
    opponent_probs: torch.Tensor  # [T, nodes, K, A]
    position: Position


def completed_q(visits, returns, log_policy, value):
    """Q of each action [..., A]; of one that was not tried, a mix of the node's value [..., 1] and
    the Q of those that were (Danihelka et al. 2022, appendix D)"""
    tried = visits > 0
    q = returns / visits.clamp(min=1)
    policy = torch.where(tried, log_policy, ILLEGAL).softmax(-1) * tried
    count = visits.sum(-1, keepdim=True)
    mixed_value = (value + count * (policy * q).sum(-1, keepdim=True)) / (1 + count)
    return torch.where(tried, q, mixed_value)


def q_transform(args: Args, scale: float, visits, q):
    """What Q [..., A] adds to the logits: more, the more has been tried (sigma in the same paper,
    c_visit = 50)"""
    return args.q_temperature * (1 + visits.amax(-1, keepdim=True) / 50) * q / scale


def select_action(args: Args, scale: float, visits, returns, log_policy, value):
    """Edges [..., A] and value [...] of nodes -> the action to try next"""
    value = value[..., None]
    count = visits.sum(-1, keepdim=True)
    if args.root == "puct":
        q = torch.where(visits > 0, returns / visits.clamp(min=1), value)
        bonus = args.puct * log_policy.exp() * count.clamp(min=1).sqrt() / (1 + visits)
        score = q / scale + bonus
    else:  # visits in proportion to the improved policy
        q = completed_q(visits, returns, log_policy, value)
        improved = (log_policy + q_transform(args, scale, visits, q)).softmax(-1)
        score = improved - visits / (1 + count)
    return torch.where(log_policy > ILLEGAL / 2, score, -torch.inf).argmax(-1)


@functools.cache
def sequential_halving(num_actions: int, num_simulations: int, device) -> torch.Tensor:
    """[considered, k]: how often an action has been visited that sequential halving visits in
    simulation k, if it begins with so many actions: all of them equally often, then the better
    half, and so on. 4 actions, 8 simulations: 0 0 0 0 1 1 2 2"""
    table = []
    for considered in range(num_actions + 1):
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


def gumbel_root_action(args: Args, scale: float, visits, returns, log_policy, value, gumbel, due):
    """The root's next action: of those visited `due` [T] times, the best by noise [T, A], logits
    and Q"""
    q = completed_q(visits, returns, log_policy, value[..., None])
    score = gumbel + log_policy + q_transform(args, scale, visits, q)
    score = torch.where(log_policy > ILLEGAL / 2, score, ILLEGAL)
    return torch.where(visits == due[:, None], score, 2 * ILLEGAL).argmax(-1)


def init_tree(args: Args, scale, root: Position, ended, log_policy, value, opponent_probs, nodes):
    """Trees of so many nodes that are only roots, with what `evaluate` said; where `ended` [T]
    nothing can grow"""

    def allocate(x):  # [T, ...] of the roots -> [T, nodes, ...]
        grown = x.new_zeros(len(x), nodes, *x.shape[1:])
        grown[:, 0] = x
        return grown

    none = torch.zeros_like(log_policy)
    best = select_action(args, scale, none, none, log_policy, value)
    tree = Tree(
        visits=allocate(none),
        returns=allocate(none),
        log_policy=allocate(log_policy),
        child=allocate(none.long()),
        value=allocate(value),
        reward=allocate(none[:, 0]),
        ended=allocate(ended),
        best=allocate(best),
        best_child=torch.arange(nodes, device=ended.device).repeat(len(ended), 1),
        opponent_probs=allocate(opponent_probs),
        position=tree_map(allocate, root),
    )
    tree.log_policy[:, 1:] = ILLEGAL
    return tree


class TreePath(NamedTuple):
    """From the root to where a tree grows: edges d = 0 ... depth - 1, some at the end without
    use"""

    node: torch.Tensor  # int64 [T, depth] where edge d begins
    action: torch.Tensor  # int64 [T, depth]
    mask: torch.Tensor  # bool [T, depth] the edge is part of the path
    value: torch.Tensor  # [T, depth + 1] of the nodes on the way
    reward: torch.Tensor  # [T, depth + 1]
    last: torch.Tensor  # int64 [T, 1] the last edge
    parent: torch.Tensor  # int64 [T] where it begins
    last_action: torch.Tensor  # int64 [T]
    is_new: torch.Tensor  # bool [T] it has no child yet


def select_path(tree: Tree, depth: int, allowed) -> TreePath:
    """Follows the pointers `depth` times; nowhere where not allowed, bool [T, 1]"""
    nodes = [torch.zeros_like(allowed, dtype=torch.int64)]
    for _ in range(depth):
        nodes.append(tree.best_child.gather(1, nodes[-1]))  # where the path is over, its last node again
    path = torch.cat(nodes, 1)
    node = path[:, :-1]
    action = tree.best.gather(1, node)
    moved = torch.cat([torch.ones_like(allowed), node[:, 1:] != node[:, :-1]], 1)
    mask = moved & ~tree.ended.gather(1, node) & allowed
    last = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
    parent = node.gather(1, last)[:, 0]
    return TreePath(
        node=node,
        action=action,
        mask=mask,
        value=tree.value.gather(1, path),
        reward=tree.reward.gather(1, path),
        last=last,
        parent=parent,
        last_action=action.gather(1, last)[:, 0],
        is_new=mask.any(1) & (path[:, 1:].gather(1, last)[:, 0] == parent),
    )


def path_returns(args: Args, path: TreePath, reward, value) -> torch.Tensor:
    """[T, depth] the return from each edge on. The path ends in the new node (reward and value [T])
    or in an old one: an end, or the deepest allowed"""
    depth = path.mask.shape[1]
    at_new = (torch.arange(depth, device=value.device) == path.last) & path.is_new[:, None]
    rewards = torch.where(at_new, reward[:, None], path.reward[:, 1:]) * path.mask
    last_value = torch.where(path.is_new, value, path.value[:, 1:].gather(1, path.last)[:, 0])
    powers = args.gamma ** torch.arange(depth + 1, dtype=value.dtype, device=value.device)
    ahead = (rewards * powers[:-1]).flip(1).cumsum(1).flip(1)
    beyond = powers[path.mask.sum(1, keepdim=True)] * last_value[:, None]
    return (ahead + beyond) / powers[:-1]


def update_best(args: Args, scale: float, tree: Tree, changed, value):
    """What to try next from the nodes `changed` [T, n], which have value [T, n] -> `best` and
    `best_child`"""
    rows = torch.arange(len(changed), device=changed.device)[:, None]
    edges = tree.visits[rows, changed], tree.returns[rows, changed], tree.log_policy[rows, changed]
    best = select_action(args, scale, *edges, value)
    child = tree.child[rows, changed, best]
    return best, torch.where(child > 0, child, changed)


def pick(probs, uniform):
    """[..., A], [...] -> the action whose stretch of [0, 1) holds `uniform`"""
    *below, total = itertools.accumulate(probs.unbind(-1))
    return sum(edge <= uniform * total for edge in below)


def search(args: Args, scale, root: Position, ended, advance, evaluate, uniform, gumbel, record_time):
    """Grows trees from `root` (not where `ended` [T]), one simulation for each of `uniform`
    [simulations, T, K], which says what the co-players do on the new edge. advance(position, joint)
    -> position, reward, ended; evaluate(position) -> log of the policy [T, A] (ILLEGAL where an
    action is), value [T], the co-players' probabilities [T, K, A]; scale: of Q; gumbel [T, A]:
    noise of the Gumbel root; record_time(name) is called when a phase is over. -> Tree"""
    simulations = len(uniform)
    spare = simulations + 1
    one_step = args.planner == "one-step"
    deepest = 1 if one_step else min(simulations, args.max_depth)
    stride = math.ceil(deepest / 4) if args.compile else 1  # four depths: each is compiled anew
    rows = torch.arange(len(ended), device=ended.device)
    log_policy, value, opponent_probs = evaluate(root)
    tree = init_tree(args, scale, root, ended, log_policy, value, opponent_probs, simulations + 2)
    visits = tree.visits.flatten(1)  # views: what is written here is written in the tree
    returns = tree.returns.flatten(1)
    child = tree.child.flatten(1)
    record_time("network")
    actions = log_policy.shape[1]
    legal = log_policy > ILLEGAL / 2
    allowed = torch.ones_like(ended)[:, None]
    due = sequential_halving(actions, simulations, ended.device)[legal.sum(1)]  # [T, simulations]
    for k in range(simulations):
        # Select: each node knows what to try next.
        if one_step:
            tree.best[:, 0] = k
            tree.best_child[:, 0] = 0
            allowed = legal[:, k : k + 1]
        elif args.root == "gumbel":
            edges = tree.visits[:, 0], tree.returns[:, 0], tree.log_policy[:, 0]
            action = gumbel_root_action(args, scale, *edges, tree.value[:, 0], gumbel, due[:, k])
            tree.best[:, 0] = action
            tree.best_child[:, 0] = tree.child[:, 0].gather(1, action[:, None])[:, 0]
        path = select_path(tree, min(deepest, stride * (k // stride + 1)), allowed)
        record_time("select")
        # Expand: the co-players' actions on this edge, the new position, and what the networks say
        # about it.
        others = pick(tree.opponent_probs[rows, path.parent], uniform[k])
        joint = torch.cat([path.last_action[:, None], others], 1)
        parent = Position(*(x[rows, path.parent] for x in tree.position))
        position, reward, over = advance(parent, joint)
        record_time("expand")
        log_policy, value, opponent_probs = evaluate(position)
        value = torch.where(over, 0.0, value)
        tree.log_policy[:, k + 1] = log_policy
        tree.value[:, k + 1] = value
        tree.reward[:, k + 1] = reward
        tree.ended[:, k + 1] = over
        tree.opponent_probs[:, k + 1] = opponent_probs
        for kept, new in zip(tree.position, position, strict=True):
            kept[:, k + 1] = new
        record_time("network")
        # Back up: returns to the edges of the path, the new child, and what to try next from all
        # that changed.
        edge_returns = path_returns(args, path, reward, value)
        node = torch.where(path.mask, path.node, spare)
        edge = node * actions + path.action
        visits.scatter_add_(1, edge, torch.ones_like(edge_returns))
        returns.scatter_add_(1, edge, edge_returns)
        new_edge = torch.where(path.is_new, path.parent, spare) * actions + path.last_action
        child.scatter_(1, new_edge[:, None], k + 1)
        changed = torch.cat([node, torch.full_like(rows[:, None], k + 1)], 1)
        values = torch.cat([path.value[:, :-1], value[:, None]], 1)
        best, best_child = update_best(args, scale, tree, changed, values)
        tree.best.scatter_(1, changed, best)
        tree.best_child.scatter_(1, changed, best_child)
        record_time("backup")
    return tree


def root_policy(args: Args, scale: float, tree: Tree, gumbel, num_trees: int):
    """The trees of a decision -> log of the improved policy [n, A], what is played [n, A], visits
    [n, A], Q [n, A]. pUCT plays the improved policy, a softmax of beta * Q / scale (and of the
    policy's logits, --search-prior); the Gumbel root the best action by noise, logits and Q: with
    one tree among the most visited, with several among all."""

    def by_decision(x):  # [T, nodes, ...] -> of the roots [n, trees, ...]
        return x[:, 0].unflatten(0, (-1, num_trees))

    visits = by_decision(tree.visits)
    logits = by_decision(tree.log_policy)
    value = by_decision(tree.value)[..., None]
    q = completed_q(visits, by_decision(tree.returns), logits, value).mean(1)
    visits = visits.sum(1)
    logits = logits[:, 0]
    legal = logits > ILLEGAL / 2
    if args.root == "gumbel":
        gain = q_transform(args, scale, visits / num_trees, q)
        prior = logits
    else:
        gain = args.q_temperature * q / scale
        prior = args.search_prior * logits
    improved = torch.where(legal, prior + gain, ILLEGAL).log_softmax(-1)
    ended = by_decision(tree.ended)[:, :1]
    improved = torch.where(ended, logits, improved)  # nothing was searched
    if args.root == "puct" or args.planner == "one-step":
        return improved, improved.exp(), visits, q
    score = gumbel[::num_trees] + logits + gain
    if num_trees == 1:  # several trees do not agree on whom they visit most
        most = torch.where(legal, visits, -1)
        score = torch.where(most == most.amax(1, keepdim=True), score, 2 * ILLEGAL)
    played = F.one_hot(score.argmax(1), score.shape[1]).to(q.dtype)
    return improved, played, visits, q


class Plan(NamedTuple):
    """What a search found, for M learners in E games each"""

    log_probs: torch.Tensor  # [M, E, 7] of the improved policy
    played: torch.Tensor  # [M, E, 7] probabilities of what is played
    visits: torch.Tensor  # [M, E, 7] of the root's actions
    q: torch.Tensor  # [M, E, 7]
    stats: torch.Tensor  # [M, E, 3] gain: what Q promises beyond the policy's own; KL to it; mean length of a path


def plan_actions(args: Args, env, networks, infer, position: Position, walls, belief, record_time):
    """Searches from Position [M, E, ...] with the belief of infer_opponents. infer:
    infer_opponents, or what stands for it. -> Plan, Tree"""
    config = env.config
    trees = args.num_trees
    k = config.num_players - 1
    m, games = position.time.shape
    simulations = NUM_ACTIONS if args.planner == "one-step" else args.num_simulations
    params = belief.params.unflatten(1, (games, k))
    inputs = (position, walls, belief.goals, params)
    inputs = tree_map(lambda x: x.repeat_interleave(trees, 1), inputs)
    position, walls, goals, params = inputs
    params = params.flatten(1, 2)
    if not args.infer_in_tree:
        noise = goal_noise(args, m, games * trees * k, device=env.device)
        moa_goal = sample_goal(args.goal_kind, params, noise)
        if args.subgoals == "actions":
            moa_goal = goal_mean(args.goal_kind, params)
    record_time("infer_subgoals")

    def by_learner(x):  # [T = M*n, ...] -> [M, n, ...]
        return x.unflatten(0, (m, -1))

    def evaluate(position: Position):
        here = tree_map(by_learner, position)
        clock = here.time / config.final_time
        views = entity_views(env, here.board, walls)
        if args.infer_in_tree:
            belief = infer(args, env, networks, views, clock, here.history)
            record_time("infer_subgoals")
            noise = goal_noise(args, *belief.params.shape[:2], device=env.device)
            opponent_probs = predict_actions(args, networks, belief, clock, noise).exp()
            policy_goals = belief.goals
        else:
            opponent_probs = predict_opponents(networks, views, clock, moa_goal)
            policy_goals = opponent_probs.flatten(2) if args.subgoals == "actions" else goals
        record_time("moa")
        _, _, log_probs, value = evaluate_policy(args, networks.policy, views, clock, here.last_joint, policy_goals)
        return log_probs.flatten(0, 1), value.flatten(), opponent_probs.flatten(0, 1)

    def advance(position: Position, joint):
        here = tree_map(by_learner, position)
        learner_joint = by_learner(joint)
        if args.search_model == "env":
            next_board, reward = env_transition(env, position, walls.flatten(0, 1), joint)
        else:
            next_board, reward = predict_step(networks.world, here.board, walls, learner_joint)
            next_board = next_board.flatten(0, 1)
            reward = reward.flatten()
        reward = shape_reward(args, config, reward, position.board, joint, next_board)
        time_next = position.time + 1
        over, first_hunt = imagined_end(config, position.board, next_board, time_next, position.first_hunt)
        history = position.history
        if args.infer_in_tree:
            views = entity_views(env, here.board, walls)
            belief = infer(args, env, networks, views, here.time / config.final_time, here.history)
            no_end = torch.zeros_like(by_learner(over))
            history = update_history(args, env, networks, belief, learner_joint, here.history, no_end)
            history = history.flatten(0, 1)
        return Position(next_board, time_next, first_hunt, joint, history), reward, over

    if not args.infer_in_tree:
        position = position._replace(history=position.history[..., :0])
    root = tree_map(lambda x: x.flatten(0, 1), position)
    uniform = torch.rand(simulations, len(root.time), k, device=env.device)
    gumbel = torch.rand(m * games, NUM_ACTIONS, device=env.device).clamp(1e-6, 1 - 1e-6)
    gumbel = -(-gumbel.log()).log().repeat_interleave(trees, 0)  # the same in all trees of a decision
    scale = max(abs(payoff) for payoff in config.payoffs()) or 1.0
    ended = ~learner_mask(config, root.board)
    tree = search(args, scale, root, ended, advance, evaluate, uniform, gumbel, record_time)
    log_probs, played, visits, q = root_policy(args, scale, tree, gumbel, trees)
    log_policy = tree.log_policy[::trees, 0]
    gain = ((log_probs.exp() - log_policy.exp()) * q).sum(1)
    kl = (log_probs.exp() * (log_probs - log_policy).clamp(-50, 50)).sum(1)
    edges_walked = tree.visits[:, :-1].sum((1, 2))  # of a path of d edges d are counted
    depth = edges_walked / tree.visits[:, 0].sum(1).clamp(min=1)
    stats = torch.stack([gain, kl, depth.view(-1, trees).mean(1)], 1)
    record_time("backup")
    fields = (log_probs, played, visits, q, stats)
    return Plan(*(x.view(m, games, -1) for x in fields)), tree


def predict_opponents(networks: Networks, views: tuple, clock, goal):
    """What co-players that pursue `goal` [M, n*K, D] do on boards seen as `views` [M, n, N, ...] ->
    [M, n, K, 7]"""
    board, walls, legal = co_players(views)
    k = views[0].shape[2] - 1
    log_probs = networks.moa(board, walls, clock.repeat_interleave(k, 1), goal, legal)
    return log_probs.exp().unflatten(1, (-1, k))


def env_transition(env, position: Position, walls, joint):
    """The game's own rules, the same for all seats, on boards [T, N + P] -> the next boards, the
    learner's reward"""
    config = env.config
    gone = config.num_cells
    players, prey = position.board.int().split([config.num_players, config.num_prey], 1)
    state = game.State(
        position=players.clamp(max=gone - 1),
        present=players < gone,
        prey_position=prey.clamp(max=gone - 1),
        prey_alive=prey < gone,
        walls=walls.expand(-1, gone),
        time=position.time,
        first_hunt=position.first_hunt,
    )
    state, reward, _, _ = env.transition(state, joint)
    players = torch.where(state.present, state.position, gone)
    prey = torch.where(state.prey_alive, state.prey_position, gone)
    return torch.cat([players, prey], 1).to(torch.uint8), reward[:, 0]


# ---- Rollout


class Replay:
    """A ring of the last rollouts [rollouts, M, T, E, ...] on the device, allocated when the first
    one comes in; of the histories, by far the largest, only those before each rollout's first
    step."""

    def __init__(self, num_rollouts: int, device):
        self.num_rollouts = num_rollouts
        self.data = None
        self.pushed = torch.zeros((), dtype=torch.int64, device=device)  # how many came in

    def push(self, transitions: "Transitions") -> None:
        transitions = transitions._replace(history=transitions.history[:, :1])
        if self.data is None:
            self.data = tree_map(lambda x: x.new_zeros(self.num_rollouts, *x.shape), transitions)
        slot = (self.pushed % self.num_rollouts)[None]
        for kept, new in zip(self.data, transitions, strict=True):
            kept.index_copy_(0, slot, new[None])
        self.pushed.add_(1)

    def sample(self, count: int, window: int) -> "Transitions":
        """Windows of so many whole rollouts [M, window * T, count, ...]; 0: single steps [M, count,
        ...]. Where nothing follows the first rollout yet, its last step is marked as the end of a
        game."""
        rollouts, m, steps, games = self.data.done.shape
        device = self.pushed.device
        slot, step, column = torch.rand(3, m, count, device=device)
        slot = (slot * self.pushed.clamp(max=rollouts)).long()
        step = (step * steps).long()
        column = (column * games).long()
        learner = torch.arange(m, device=device)[:, None]
        if window:
            newest = slot == (self.pushed - 1) % rollouts
            step = torch.arange(window * steps, device=device)[:, None]
            slot = (slot[:, None] + step // steps) % rollouts
            learner = learner[:, None]
            column = column[:, None]
        places = {steps: step % steps, 1: torch.zeros_like(step)}  # histories have only the first step
        samples = tree_map(lambda x: x[slot, learner, places[x.shape[2]], column], self.data)
        if window:
            samples.done[:, steps - 1] |= newest
        return samples

    def state_dict(self) -> dict:
        data = {} if self.data is None else {"data": self.data._asdict()}
        return {"pushed": self.pushed, **data}

    def load_state_dict(self, saved: dict) -> None:
        kept = self.state_dict()
        if "data" not in saved:  # nothing had come in yet
            kept.pop("data", None)
        elif self.data is None:
            data = {name: x.to(self.pushed.device) for name, x in saved["data"].items()}
            self.data = Transitions(**data)
        game.copy_nested_(kept, saved, "replay")


class Games:
    """Games under way of M learners, E each, and the last rollouts of them. tables: who sits where,
    N names for each block of --num-envs games. watch: rule-based players play, the learners look
    on; teams: every second time a team of one kind."""

    def __init__(self, args: Args, tables: list[list[str]], device, watch: bool = False, teams: bool = False):
        config = args.config
        decay = history_decay(args)
        redraw = args.redraw
        if watch:
            redraw = "never" if decay else "game"
        env_seed = torch.initial_seed() + 1
        num_envs = len(tables) * args.num_envs
        self.env = StagHuntEnv(config, num_envs, device, env_seed, compile=args.compile)
        self.seats = game.Seats(
            self.env,
            tables,
            share_parameters=args.share_parameters,
            population=args.population,
            redraw=redraw,
            remember=decay > 0,
            watch=watch,
            teams=teams,
            unsteady=args.unsteady if decay else 0.0,
        )
        shape = self.seats.learner_seat.shape  # [M, E]
        self.last_joint = torch.full((*shape, config.num_players), STAY, device=device)
        history_size = 2 * args.subgoal_hidden if needs_models(args) else 0
        if args.subgoals == "hop":
            history_size = 4
        self.history = torch.zeros(*shape, config.num_players - 1, history_size, device=device)
        self.replay = Replay(args.replay_rollouts, device)

    def state_dict(self) -> dict:
        return {
            "env": self.env.state_dict(),
            "seats": self.seats.state_dict(),
            "replay": self.replay.state_dict(),
            "last_joint": self.last_joint,
            "history": self.history,
        }


class Transitions(NamedTuple):
    """T steps of M learners, each field [M, T, E, ...]; this is what the replay keeps"""

    board: torch.Tensor  # uint8 [..., N + P]
    walls: torch.Tensor  # uint8 [..., H*W] (one 0 where the game has none)
    time: torch.Tensor  # uint8
    first_hunt: torch.Tensor  # int16
    last_joint: torch.Tensor  # uint8 [..., N] what everybody did before this step
    joint: torch.Tensor  # uint8 [..., N] and in it
    reward: torch.Tensor  # the learner's, from the game
    next_board: torch.Tensor  # uint8 [..., N + P] of the same game, also at its end
    done: torch.Tensor  # bool: the game ended with the step
    history: torch.Tensor  # bfloat16 [..., K, 2 * hidden] before the step
    history_reset: torch.Tensor  # bool: and cleared after it


def exited(config: StagHuntConfig, board, next_board) -> torch.Tensor:
    """bool [..., N]: who left the board with the step"""
    before = board[..., : config.num_players]
    after = next_board[..., : config.num_players]
    return (before < config.num_cells) & (after == config.num_cells)


def learner_mask(config: StagHuntConfig, board) -> torch.Tensor:
    """bool [...]: does the step count? The learner is on the board."""
    return board[..., 0] < config.num_cells


def shape_reward(args: Args, config: StagHuntConfig, reward, board, joint, next_board):
    """The learner's reward for a step, real or imagined: the place for a bonus of your own. reward
    [...] from the game; boards uint8 [..., N + P] before and after the step, the learner first
    (cell = row * width + column; take .long() before you subtract); joint action [..., N] ->
    [...]"""
    return reward


def evaluate_policy(args: Args, policy: Stacked, views: tuple, clock, last_joint, goals):
    """views [M, n, N, ...] (see entity_views), of which the policy reads the learner's own -> its
    inputs [M, n, i], legal actions, log-probabilities [M, n, 7], values [M, n]"""
    board, walls, legal = (x[:, :, 0] for x in views)
    inputs = policy_inputs(args, board, walls, clock, last_joint, goals)
    log_probs, value = policy(inputs, legal)
    return inputs, legal, log_probs, value


def perceive(args: Args, env, networks: Networks, infer, board, walls, clock, last_joint, history):
    """What learners make of boards [M, n, N + P], real or imagined. -> their belief about
    co-players (None without q_phi); what the policy read and said, a dict of [M, n, ...]"""
    belief = None
    goals = clock.new_zeros(*clock.shape, 0)
    views = entity_views(env, board, walls, 1 if networks.inference is None else None)
    if networks.inference is not None:
        belief = infer(args, env, networks, views, clock, history)
        goals = belief.goals
    inputs, legal, log_probs, value = evaluate_policy(args, networks.policy, views, clock, last_joint, goals)
    output = {
        "inputs": inputs,
        "legal": legal,
        "goals": goals,
        "log_probs": log_probs,
        "value": value,
    }
    return belief, output


def stack_steps(steps: list, dim: int = 1):
    """Dicts or named tuples of tensors -> one of stacked tensors"""
    return tree_map(lambda *x: torch.stack(x, dim), *steps)


@torch.no_grad()
def rollout(args: Args, games: Games, networks: Networks, num_steps: int, infer=None, timer=None):
    """Plays num_steps steps of all games; learners act unless the games are only watched. infer:
    another infer_opponents. -> Transitions; outputs, a dict of what the policy read and said [M, T,
    E, ...] (value: [M, T + 1, E]) and what its search found; episodes, a dict of what finished
    games left [T, B, ...] and of action probabilities [T / 8, B, N, 7]. timer: of the first
    search"""
    env = games.env
    seats = games.seats
    config = env.config
    infer = infer or infer_opponents
    searches = args.planner != "none" and not seats.watch
    reset_prob = args.history_reset_prob if history_decay(args) else 0.0
    moa_stride = min(num_steps, MOA_STRIDE)
    steps, outputs, values = [], [], []
    episodes, probabilities = [], []
    cells = env.cells(env.state)
    for step in range(num_steps + 1):
        record_time = timer.record if timer and searches and step == 0 else lambda _: None
        state = env.state
        board = seats.to_learners(cells)
        walls = seats.per_learner(state.walls[:, : config.num_wall_cells])
        clock = seats.per_learner(env.clock(state))
        time_now = seats.per_learner(state.time)  # a copy: env.advance overwrites env.state
        first_hunt = seats.per_learner(state.first_hunt)
        last_joint = games.last_joint.clone()
        history = games.history.clone()
        situation = board, walls, clock, last_joint, history
        belief, output = perceive(args, env, networks, infer, *situation)
        values.append(output.pop("value"))
        log_probs = output["log_probs"]
        if step == num_steps:
            break
        record_time("network")
        search_outputs = {}
        if searches:
            position = Position(board, time_now, first_hunt, last_joint, history)
            plan, _ = plan_actions(args, env, networks, infer, position, walls, belief, record_time)
            log_probs = plan.log_probs
            search_outputs = {"played": plan.played, "visits": plan.visits, "q": plan.q, "search": plan.stats}
        probs = seats.action_probs(state, None if seats.watch else log_probs.exp())  # [B, N, 7]
        if networks.moa is not None and (step + 1) % moa_stride == 0:
            probabilities.append(probs)
        actions = game.sample(seats.to_seats(plan.played, probs) if searches else probs)
        joint = seats.to_learners(env.seats_to_ego(actions))
        reward, present_before, done = env.advance(actions)
        seats.update(actions, present_before, done)
        cells = env.cells(env.state)
        last_cells = torch.where(done[:, None, None], env.cells(env.final_state), cells)
        next_board = seats.to_learners(last_cells)
        learner_done = seats.per_learner(done)
        history_reset = torch.zeros_like(learner_done)
        if networks.inference is not None:
            counted = history
            if args.subgoals == "hop":
                counted = count_hunts(args, joint, exited(config, board, next_board), history)
            next_history = update_history(args, env, networks, belief, joint, counted, learner_done)
            history_reset = torch.rand(learner_done.shape, device=env.device) < reset_prob
            history_reset = history_reset & learner_done
            games.history.copy_(next_history.masked_fill(history_reset[..., None, None], 0.0))
        games.last_joint.copy_(joint.masked_fill(learner_done[..., None], STAY))
        steps.append(
            Transitions(
                board=board,
                walls=walls,
                time=time_now.byte(),
                first_hunt=first_hunt.short(),
                last_joint=last_joint.byte(),
                joint=joint.byte(),
                reward=seats.to_learners(reward),
                next_board=next_board,
                done=learner_done,
                history=history.bfloat16(),
                history_reset=history_reset,
            )
        )
        outputs.append({**output, "log_probs": log_probs, **search_outputs})
        episodes.append(
            {
                "done": done,
                "return": env.final_return.clone(),
                "length": env.final_length.clone(),
                "prey": env.final_prey,
            }
        )
    outputs = {**stack_steps(outputs), "value": torch.stack(values, 1)}
    episodes = stack_steps(episodes, 0)
    if probabilities:
        episodes["probs"] = torch.stack(probabilities)
    return stack_steps(steps), outputs, episodes


# ---- Training of the models


def sample_replays(replay: Replay, offline: Replay | None, offline_ratio: float, count: int, window: int):
    """As Replay.sample, a share of it from the rule-based games: at least one where it is neither 0
    nor 1"""
    if offline is None:
        return replay.sample(count, window)
    rule_based = round(count * offline_ratio)
    if 0 < offline_ratio < 1 and count > 1:
        rule_based = min(max(rule_based, 1), count - 1)
    parts = []
    if rule_based < count:
        parts.append(replay.sample(count - rule_based, window))
    if rule_based > 0:
        parts.append(offline.sample(rule_based, window))
    return tree_map(lambda *x: torch.cat(x, 2 if window else 1), *parts)


def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    total = (x * weight).flatten(1).sum(1)
    return total / weight.flatten(1).sum(1).clamp(min=1e-6)


def mean_over_updates(metrics: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if not metrics:
        return {}
    return {name: x.detach().mean(0) for name, x in stack_steps(metrics, 0).items()}


def count_before(x) -> torch.Tensor:
    """bool [M, T, ...] -> int64: in how many earlier steps it was true"""
    return x.cumsum(1) - x.long()


def same_game(done) -> torch.Tensor:
    """done [M, T, G] of windows -> bool [M, t, u, G, 1]: steps t and u belong to one game"""
    number = count_before(done)
    return (number[:, :, None] == number[:, None])[..., None]


class OpponentRows(NamedTuple):
    """The co-players' steps in windows of T steps of G games: n = T*G*K rows, [M, n, ...]"""

    board: torch.Tensor  # [..., N + P] as the co-player sees it
    walls: torch.Tensor
    legal: torch.Tensor  # bool [..., 7]
    features: torch.Tensor  # [..., hidden] of q_phi's encoder
    history: torch.Tensor  # [M, T, G, K, 2 * hidden] before the step


def encode_history(args: Args, env, networks: Networks, windows: Transitions) -> OpponentRows:
    """Runs q_phi along windows [M, T, G, ...], from the history before their first step on"""
    history = windows.history[:, 0].float()
    views = entity_views(env, windows.board.flatten(1, 2), windows.walls.flatten(1, 2))
    board, walls, legal = co_players(views)
    features = networks.inference(board, walls, method="encoder")
    seen = windows.joint.long()[..., env.ego[1:]].flatten(1, 3)
    shape = *windows.done.shape[1:], history.shape[2]  # [T, G, K]
    event = networks.inference(features, seen, method="event").unflatten(1, shape)
    present = (board[..., 0] < env.config.num_cells).unflatten(1, shape)
    event = event * present[..., None]
    histories = sum_events(args, history, event, windows.done, windows.history_reset)
    return OpponentRows(board, walls, legal, features, histories)


def sum_events(args: Args, history, event, done, reset):
    """add_event along windows, all steps at once: history [M, G, K, 2 * hidden] before the first
    step, event [M, T, G, K, hidden], done and reset bool [M, T, G] -> the history before each step
    [M, T, G, K, 2 * hidden]"""
    steps = done.shape[1]
    now, before = history.chunk(2, -1)
    event = torch.cat([now[:, None], event], 1)  # what was known at the start comes first
    game_number = count_before(done)
    reset_number = count_before(reset)
    games_ago = game_number[:, :, None] - F.pad(game_number, (0, 0, 1, 0))[:, None]  # [M, t, event, G]
    forgotten = reset_number[:, :, None] > F.pad(reset_number, (0, 0, 1, 0))[:, None]
    earlier = torch.ones(steps, steps + 1, device=done.device).tril()[..., None]
    left = history_decay(args) ** games_ago.clamp(min=0) * ~forgotten * earlier
    weight = torch.cat([left * (games_ago == 0), left * (games_ago > 0)], 1)
    sums = torch.einsum("mtug,mugkh->mtgkh", weight, event)
    sum_now, sum_before = sums.chunk(2, 1)
    sum_before = sum_before + left[:, :, 0, :, None, None] * before[:, None]
    return torch.cat([sum_now, sum_before], -1)


def hindsight_goals(args: Args, env, networks, selection: str, windows: Transitions, goals, prior, present, done):
    """The subgoal that each co-player turned out to pursue, f_psi(s^g). windows [M, T, G, ...];
    goals [M, T, G, K, D] as inferred. Of these and the following steps, U in all: prior [M, U, G,
    K, _], f_psi of each state; present bool [M, U, G, K]; done bool [M, U, G] -> parameters like
    prior, of T steps"""
    steps = goals.shape[1]
    ends = present.shape[1]
    index = torch.arange(ends, device=present.device)  # of a step
    now = index[:steps, None]
    same = same_game(done)[:, :steps] & present[:, None]  # [M, T, U, G, K]
    if selection == "final":
        ahead = same & (index >= now)[..., None, None]
        chosen = torch.where(ahead, index[:, None, None], -1).amax(2)  # [M, T, G, K]
        has_goal = chosen >= 0
    else:
        later = now + torch.arange(1, args.subgoal_horizon + 1, device=present.device)  # [T, h]
        inside = later.clamp(max=ends - 1)
        valid = same[:, now, inside] & (later < ends)[..., None, None]  # [M, T, h, G, K]
        candidates = goal_mean(args.goal_kind, prior)[:, inside]  # [M, T, h, G, K, D]
        value = candidate_values(args, env, networks, windows, goals, candidates)
        score = value if selection == "conservative" else -value
        steps_ahead = 1 + torch.where(valid, score, math.inf).argmin(2)
        chosen = (now[..., None] + steps_ahead).clamp(max=ends - 1)
        has_goal = valid.any(2)
    chosen = torch.where(has_goal, chosen, now[..., None])[..., None]  # else the present state
    return prior.gather(1, chosen.expand(*chosen.shape[:4], prior.shape[4]))


def candidate_values(args: Args, env, networks, windows: Transitions, goals, candidates):
    """V(s_t, g) [M, T, h, G, K]: the critic's value if co-player j pursued its candidate [M, T, h,
    G, K, D] and the others what is inferred of them, goals [M, T, G, K, D]"""
    k = goals.shape[3]
    is_j = torch.eye(k, dtype=torch.bool, device=goals.device)[..., None]  # [j, K, 1]
    candidates = candidates[:, :, :, :, None]
    tried = torch.where(is_j, candidates, goals[:, :, None, :, None])  # [M, T, h, G, j, K, D]
    steps = tree_map(lambda x: x.flatten(1, 2), windows)
    board, walls, _ = (x[:, :, 0] for x in entity_views(env, steps.board, steps.walls, 1))
    clock = steps.time / env.config.final_time
    step_goals = goals.flatten(1, 2).flatten(2)
    inputs = policy_inputs(args, board, walls, clock, steps.last_joint, step_goals)
    features, _ = networks.policy(inputs, method="features")
    features = features.unflatten(1, windows.done.shape[1:])  # [M, T, G, _]
    features = features[:, :, None, :, None].expand(*tried.shape[:5], -1)
    value = networks.policy(features.flatten(1, 4), tried.flatten(5).flatten(1, 4), method="value")
    return value.view(tried.shape[:5])


def moa_subgoals(args: Args, windows: Transitions, posterior, goal, hindsight, eps):
    """What MOA reads in training [M, n, D]: q_phi's draw `goal` [M, n, D]; in a share eps f_psi's
    in hindsight [M, n, _]"""
    if args.subgoals == "actions":
        return goal_mean(args.goal_kind, posterior)
    goal = earlier_goals(windows.done, goal)
    use_hindsight = torch.rand(*goal.shape[:2], 1, device=goal.device) < eps
    return torch.where(use_hindsight, goal_mean(args.goal_kind, hindsight), goal)


def earlier_goals(done, goal):
    """A subgoal outlasts a step: every second time that of a step drawn among those of the game so
    far, in step 3 of a game 0, 1, 2 or 3. done [M, T, G], goal [M, n, D] -> [M, n, D]"""
    steps = done.shape[1]
    goal = goal.unflatten(1, (*done.shape[1:], -1))  # [M, T, G, K, D]
    now = torch.arange(steps, device=goal.device).view(1, -1, 1, 1)
    age = now - same_game(done).byte().argmax(2)  # since the game or the window began
    back = torch.rand(goal.shape[:-1], device=goal.device) * (age + 1)
    back = back * (torch.rand(goal.shape[:-1], device=goal.device) < 0.5)
    earlier = F.one_hot(now - back.long(), steps).float()
    # A product, as the gradient of gather differs run by run.
    return torch.einsum("mtgku,mugkd->mtgkd", earlier, goal).flatten(1, 3)


def opponent_model_losses(args: Args, env, networks: Networks, windows, eps, pretraining=False, ahead: int = 0):
    """windows of T steps of G games [M, T, G, ...] -> dict of losses [M], means over the
    co-players' steps that count; `loss` is their sum: MOA's cross-entropy, reconstruction, KL(q_phi
    || f_psi(s^g)); in pretraining also f_psi's. ahead: so many more steps follow, in which games
    may go on and co-players may reach their subgoals"""
    with_future = windows
    windows = tree_map(lambda x: x[:, : x.shape[1] - ahead], with_future)
    if args.subgoals == "hop":
        return hop_losses(env, networks, windows, with_future)
    rows = encode_history(args, env, networks, windows)
    shape = rows.history.shape[:-1]  # [M, T, G, K]
    history = rows.history.flatten(1, 3)
    posterior = networks.inference(rows.features, history)
    board, walls, _ = co_players(entity_views(env, with_future.board.flatten(1, 2), with_future.walls.flatten(1, 2)))
    present = (board[..., 0] < env.config.num_cells).view(*with_future.done.shape, -1)
    with torch.set_grad_enabled(pretraining and torch.is_grad_enabled()):
        prior = networks.prior(board, walls)
    selection = args.subgoal_selection if args.subgoals == "inferred" and not pretraining else "final"
    with torch.no_grad():
        goals = goal_mean(args.goal_kind, posterior).view(*shape, -1)
        priors = prior.view(*present.shape, -1)
        hindsight = hindsight_goals(args, env, networks, selection, windows, goals, priors, present, with_future.done)
        hindsight = hindsight.flatten(1, 3)
    noise = goal_noise(args, *posterior.shape[:2], device=env.device)
    goal = sample_goal(args.goal_kind, posterior, noise)
    reconstruction = networks.inference(goal, history, method="reconstruct")
    moa_goal = moa_subgoals(args, windows, posterior, goal, hindsight, eps)
    weight = row_weights(windows.done, present[:, : shape[1]])
    losses = {
        "moa": moa_loss(env, networks.moa, rows, windows, moa_goal, weight),
        "recon": reconstruction_loss(env, rows, reconstruction, weight),
        "kl": masked_mean(goal_kl(args.goal_kind, posterior, hindsight), weight),
    }
    losses["loss"] = losses["moa"]
    if args.subgoals != "actions":
        losses["loss"] = losses["moa"] + losses["recon"] + args.kl_coef * losses["kl"]
    if pretraining:
        prior = prior[:, : posterior.shape[1]]
        f_psi_loss = prior_loss(args, env, networks, rows, windows, prior, weight)
        losses["loss"] = losses["loss"] + f_psi_loss
    return losses


def hop_losses(env, networks: Networks, windows: Transitions, whole: Transitions):
    """HOP: MOA given the prey, stag or hare, that the co-player took, where these steps show it. ->
    losses [M]"""
    board, walls, legal = co_players(entity_views(env, windows.board.flatten(1, 2), windows.walls.flatten(1, 2)))
    has_exited = exited(env.config, whole.board, whole.next_board)
    caught = torch.where(has_exited, whole.joint.long() - STAY, 0)[:, None, ..., 1:]
    same = same_game(whole.done)[:, : windows.done.shape[1]]
    taken = (same * caught).amax(2)  # [M, T, G, K]: 1 stag, 2 hare, 0 nothing
    counts = (board[..., 0] < env.config.num_cells).view(taken.shape) & (taken > 0)
    weight = row_weights(windows.done, counts)
    goal = F.one_hot((taken.flatten(1) - 1).clamp(min=0), 2).float()
    clock = (windows.time / env.config.final_time).flatten(1).repeat_interleave(taken.shape[3], 1)
    action = windows.joint[..., 1:].flatten(1).long()[..., None]
    log_probs = networks.moa(board, walls, clock, goal, legal)
    loss = masked_mean(-log_probs.gather(2, action)[..., 0], weight)
    return {"moa": loss, "recon": 0 * loss, "kl": 0 * loss, "loss": loss}  # it has no q_phi


def row_weights(done, present):
    """[M, n]: 0 where a co-player has left. Each co-player's game weighs the same, else those who
    wander about to the end drown those who go for their prey. done [M, T, G], present bool
    [M, T, G, K]"""
    steps_in_game = (same_game(done) & present[:, None]).sum(2)
    return (present / steps_in_game.clamp(min=1)).flatten(1)


def moa_loss(env, moa: Stacked, rows: OpponentRows, windows: Transitions, goal, weight):
    """MOA's cross-entropy [M] given goal [M, n, D]"""
    k = rows.history.shape[3]
    clock = (windows.time / env.config.final_time).flatten(1).repeat_interleave(k, 1)
    action = windows.joint[..., 1:].flatten(1).long()[..., None]
    log_probs = moa(rows.board, rows.walls, clock, goal, rows.legal)
    return masked_mean(-log_probs.gather(2, action)[..., 0], weight)


def reconstruction_loss(env, rows: OpponentRows, logits, weight):
    """[M]: logits [M, n, C*H*W] of the planes that each co-player saw"""
    planes = game.planes(env.config, rows.board, rows.walls).flatten(2).float()
    error = F.binary_cross_entropy_with_logits(logits, planes, reduction="none")
    return masked_mean(error.mean(2), weight)


def prior_loss(args: Args, env, networks: Networks, rows: OpponentRows, windows: Transitions, prior, weight):
    """Of f_psi, a VAE whose subgoal also tells the action [M]; prior [M, n, _]"""
    noise = goal_noise(args, *prior.shape[:2], device=env.device)
    goal = sample_goal(args.goal_kind, prior, noise)
    kl = masked_mean(goal_kl(args.goal_kind, prior, torch.zeros_like(prior)), weight)
    recon = reconstruction_loss(env, rows, networks.prior(goal, method="reconstruct"), weight)
    moa = moa_loss(env, networks.moa_prior, rows, windows, goal, weight)
    return recon + args.kl_coef * kl + moa


class Adam:
    """torch.optim.Adam with fused=True, without the seconds that torch.optim takes to load torch's
    compiler. Learning rate and state are tensors that stay in place, as a CUDA graph wants them."""

    def __init__(self, params: list[nn.Parameter], learning_rate: float, eps=1e-8, beta2=0.999):
        device = params[0].device
        rate = torch.tensor(learning_rate, device=device)
        self.param_groups = [{"params": params, "lr": rate, "eps": eps, "beta1": 0.9, "beta2": beta2}]
        self.state = {}
        for p in params:
            self.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None]
        steps = [self.state[p]["step"] for p in params]
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            lr=group["lr"],
            beta1=group["beta1"],
            beta2=group["beta2"],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def optimizer_step(optimizer: Adam, loss, max_norm: float) -> torch.Tensor:
    """One step down the sum of losses [M]. -> the norm of each learner's gradient [M], each clipped
    to max_norm"""
    optimizer.zero_grad()
    loss.sum().backward()
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    if dist.is_initialized():
        average_over_ranks(grads)
    norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
    optimizer.step()
    return norms


def average_over_ranks(grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
    dist.all_reduce(flat)
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def train_opponent_models(args: Args, env, networks, optimizer, replay, offline, eps, updates: int, pretraining=False):
    """-> metrics [M], means over the updates"""
    metrics = []
    for _ in range(updates):
        windows = sample_replays(replay, offline, args.offline_ratio, args.subgoal_batch_size, window=2)
        losses = opponent_model_losses(args, env, networks, windows, eps, pretraining, ahead=args.num_steps)
        optimizer_step(optimizer, losses["loss"], 1.0)
        metrics.append(
            {
                "losses/moa": losses["moa"],
                "losses/opponent_models": losses["loss"],
                "omg/recon": losses["recon"],
                "omg/kl": losses["kl"],
            }
        )
    return mean_over_updates(metrics)


def train_world_model(args: Args, networks, optimizer, replay, offline, updates: int):
    """-> metrics [M], means over the updates"""
    metrics = []
    for _ in range(updates):
        batch = sample_replays(replay, offline, args.offline_ratio, args.wm_batch_size, window=0)
        step = batch.board, batch.walls.float(), batch.joint
        row_losses = networks.world(*step, batch.next_board, batch.reward, method="loss")
        loss = masked_mean(row_losses, learner_mask(args.config, batch.board))
        optimizer_step(optimizer, loss, 1.0)
        metrics.append({"losses/world_model": loss})
    return mean_over_updates(metrics)


# ---- Imagination


def imagined_end(config: StagHuntConfig, board, next_board, time_next, first_hunt):
    """Boards [..., N + P] before and after a step, the clock after it -> has the learner's game
    ended, first_hunt"""
    taken = (next_board != board)[..., config.num_players :].any(-1)
    first_hunt = torch.where(taken & (first_hunt < 0), time_next, first_hunt)
    left = next_board[..., 0] == config.num_cells  # who has left earns no more
    ended = left | (time_next >= config.final_time)
    if config.steps_after_first_hunt is not None:
        ended |= (first_hunt >= 0) & (time_next - first_hunt >= config.steps_after_first_hunt)
    return ended, first_hunt


def predict_step(world: Stacked, board, walls, joint):
    """board [M, n, N + P], walls [M, n, _], joint [M, n, N] -> the next board, the reward, one of the
    game's payoffs"""
    return world(board, walls.float(), joint, method="predict")


def always(x) -> torch.Tensor:
    """bool [M, T, ...]: true in this step and all before"""
    return x.byte().cumprod(1) > 0


def payoff_errors(config: StagHuntConfig, reward) -> torch.Tensor:
    """[...] -> [..., payoffs]: how far it is from each payoff of the game"""
    return torch.stack([(reward - payoff).abs() for payoff in config.payoffs()], -1)


@torch.no_grad()
def measure_horizon(args: Args, networks: Networks, transitions: Transitions):
    """Plays fresh games [M, T, E, ...], at most 1024, again in the world model, from the first
    collected step, with the actions that were played. -> for how many steps boards and payoffs are
    right [M], metrics [M]"""
    config = args.config
    stride = math.ceil(transitions.done.shape[2] / 1024)
    played = tree_map(lambda x: x[:, : args.imagination_horizon, ::stride], transitions)
    board = played.board[:, 0]
    predictions = []
    for k in range(played.done.shape[1]):
        board, reward = predict_step(networks.world, board, played.walls[:, k], played.joint[:, k])
        predictions.append({"board": board, "reward": reward})
    predicted = stack_steps(predictions)
    payoff = payoff_errors(config, played.reward).argmin(3)
    exact = (predicted["board"] == played.next_board).all(3)
    paid = payoff_errors(config, predicted["reward"]).argmin(3) == payoff
    valid = always(learner_mask(config, played.board)) & (count_before(played.done) == 0)
    counts = valid.sum(2)  # [M, k]
    right = {"exact_match": always(exact) & valid, "payoff_match": always(paid) & valid}
    both = right["exact_match"] & right["payoff_match"]
    trusted = both.sum(2) >= args.trust_exact_match * counts  # without a game too
    horizon = always(trusted).sum(1)
    metrics = {"wm/horizon": horizon.float()}
    for name, match in right.items():
        shares = match.sum(2) / counts.clamp(min=1e-6)
        metrics |= {f"wm/{name}/{k + 1}": share for k, share in enumerate(shares.unbind(1))}
    unknown = payoff_errors(config, transitions.reward).amin(3)  # [M, T, E]
    unknown = unknown * learner_mask(config, transitions.board)
    metrics["wm/unknown_reward"] = unknown.flatten(1).amax(1)
    return horizon, metrics


@torch.no_grad()
def replayed_states(args: Args, env, networks: Networks, windows: Transitions) -> Transitions:
    """Windows [M, T, G, ...] -> states to imagine from [M, T*G, ...], with histories of the present
    q_phi"""
    rows = encode_history(args, env, networks, windows)
    return tree_map(lambda x: x.flatten(1, 2), windows._replace(history=rows.history))


@torch.no_grad()
def imagine(args: Args, env, networks: Networks, starts: Transitions, rows: int, horizon) -> dict[str, torch.Tensor]:
    """Rollouts in the world model, `rows` at a time, from real states `starts` [M, n, ...] on. One that
    has ended, or is longer than horizon [M], begins anew at another state: no step is imagined in
    vain. -> samples [M, h, rows, ...] as make_ppo_batch reads them"""
    config = env.config
    starts = {
        "board": starts.board,
        "walls": starts.walls,
        "last_joint": starts.last_joint.long(),
        "history": starts.history.float(),
        "time": starts.time.int(),
        "first_hunt": starts.first_hunt.int(),
    }
    present = learner_mask(config, starts["board"])
    present_first = present.byte().argsort(dim=1, descending=True, stable=True)
    count = present.sum(1, keepdim=True)
    learner = torch.arange(len(present), device=present.device)[:, None]

    def draw_starts():
        """Where the learner is on the board"""
        index = (torch.rand(len(present), rows, device=present.device) * count).long()
        place = learner, present_first.gather(1, index)
        return {name: x[place] for name, x in starts.items()}

    now = draw_starts()
    age = torch.zeros_like(now["time"])  # steps since the rollout began
    samples, values = [], []
    for step in range(args.imagination_horizon + 1):
        board = now["board"]
        clock = now["time"] / config.final_time
        situation = board, now["walls"], clock, now["last_joint"], now["history"]
        belief, output = perceive(args, env, networks, infer_opponents, *situation)
        values.append(output["value"])
        if step == args.imagination_horizon:
            break
        noise = goal_noise(args, *belief.params.shape[:2], device=env.device)
        opponent_probs = predict_actions(args, networks, belief, clock, noise).exp()
        action = game.sample(output["log_probs"].exp())
        joint = torch.cat([action[..., None], game.sample(opponent_probs)], 2)
        next_board, reward = predict_step(networks.world, board, now["walls"], joint)
        time_next = now["time"] + 1
        ended, first_hunt = imagined_end(config, board, next_board, time_next, now["first_hunt"])
        mask = (age < horizon[:, None]) & (count > 0)
        samples.append(
            {
                "inputs": output["inputs"],
                "legal": output["legal"],
                "action": action,
                "log_prob": output["log_probs"].gather(2, action[..., None])[..., 0],
                "log_probs": output["log_probs"],
                "reward": shape_reward(args, config, reward, board, joint, next_board),
                "ended": ended,
                "mask": mask,
            }
        )
        after = {
            "board": next_board,
            "walls": now["walls"],
            "last_joint": joint,
            "history": update_history(args, env, networks, belief, joint, now["history"], torch.zeros_like(ended)),
            "time": time_next,
            "first_hunt": first_hunt,
        }
        over = ended | ~mask  # after a cut a rollout goes on for one step: its first value is needed
        now = draw_starts()
        for name, x in after.items():
            begins_anew = over.view(*over.shape, *[1] * (x.dim() - 2))
            now[name] = torch.where(begins_anew, now[name], x)
        age = torch.where(over, 0, age + 1)
    return {**stack_steps(samples), "value": torch.stack(values, 1)}


# ---- PPO


def compute_gae(args: Args, reward, value, ended, mask) -> torch.Tensor:
    """reward, ended, mask [M, T, E], value [M, T + 1, E] -> advantages [M, T, E]. No value is taken
    from beyond an end; where a rollout is cut (the mask goes out without an end), the value there
    stands for the rest."""
    advantages = []
    ahead = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        go_on = (~ended[:, t]).float()
        delta = reward[:, t] + args.gamma * go_on * value[:, t + 1] - value[:, t]
        ahead = delta + args.gamma * args.gae_lambda * go_on * ahead
        ahead = torch.where(mask[:, t], ahead, 0.0)  # what follows a cut is not known
        advantages.append(ahead)
    return torch.stack(advantages[::-1], 1)


def real_samples(args: Args, config: StagHuntConfig, transitions: Transitions, outputs: dict) -> dict:
    """The rollout [M, T, E, ...] as make_ppo_batch reads it"""
    board = transitions.board
    next_board = transitions.next_board
    action = transitions.joint[..., 0].long()
    left = exited(config, board, next_board)[..., 0]
    return {
        **outputs,
        "action": action,
        "log_prob": outputs["log_probs"].gather(3, action[..., None])[..., 0],
        "reward": shape_reward(args, config, transitions.reward, board, transitions.joint, next_board),
        "ended": transitions.done | left,
        "mask": learner_mask(config, board),
    }


def make_ppo_batch(args: Args, samples: dict[str, torch.Tensor], real: bool) -> dict[str, torch.Tensor]:
    """Samples [M, T, E, ...] -> [M, T*E, ...] with advantages, returns and weights"""
    value = samples["value"][:, :-1]
    advantage = compute_gae(args, samples["reward"], samples["value"], samples["ended"], samples["mask"])
    weight = samples["mask"].float() * (1.0 if real else args.imagined_weight)
    distills = real and args.planner != "none" and args.policy_loss == "distill"
    batch = {
        "inputs": samples["inputs"],
        "legal": samples["legal"],
        "action": samples["action"],
        "log_prob": samples["log_prob"],
        "log_probs": samples["log_probs"],
        "reward": samples["reward"],
        "value": value,
        "advantage": advantage,
        "returns": advantage + value,
        "weight": weight,
        "critic_weight": weight * float(real or args.critic_data == "mixed"),
        "distilled": weight * float(distills),
        "real": torch.full_like(weight, float(real)),
    }
    return {name: x.flatten(1, 2) for name, x in batch.items()}


def drop_masked(batch: dict[str, torch.Tensor], mask, least: int = 1) -> dict[str, torch.Tensor]:
    """batch [M, n, ...], mask bool [M, n]. On a CPU, where shapes may change: without rows that
    nobody counts"""
    if mask.is_cuda:
        return batch
    most = max(least, int(mask.sum(1).max()))
    order = mask.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    learner = torch.arange(len(mask))[:, None]
    return {name: x[learner, order] for name, x in batch.items()}


def ppo_loss(args: Args, policy: Stacked, mb: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO, and distillation of what was searched. mb [M, n, ...] -> each learner's loss [M],
    metrics [M]"""
    distilled = mb["distilled"] > 0
    weight = mb["weight"] * ~distilled  # of PPO
    log_probs, value = policy(mb["inputs"], mb["legal"])
    log_ratio = log_probs.gather(2, mb["action"][..., None])[..., 0] - mb["log_prob"]
    log_ratio = torch.where(distilled, 0.0, log_ratio)
    ratio = log_ratio.exp()
    advantage = mb["advantage"] - masked_mean(mb["advantage"], weight)[:, None]
    advantage = advantage / (masked_mean(advantage.square(), weight).sqrt()[:, None] + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    clipped_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    distill_loss = -(mb["log_probs"].exp() * log_probs.clamp(min=-50)).sum(2)
    policy_loss = masked_mean(torch.where(distilled, distill_loss, clipped_loss), mb["weight"])
    value_error = 0.5 * (value - mb["returns"]).square()
    value_loss = masked_mean(value_error, mb["critic_weight"])
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(2), mb["weight"])
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": masked_mean(ratio - 1 - log_ratio, weight),
        "losses/clipfrac": masked_mean(((ratio - 1).abs() > args.clip_coef).float(), weight),
        "losses/distill": masked_mean(distill_loss, mb["distilled"]),
        "losses/value_loss_real": masked_mean(value_error, mb["weight"] * mb["real"]),
        "losses/value_loss_imagined": masked_mean(value_error, mb["weight"] * (1 - mb["real"])),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def ppo_update(args: Args, policy: Stacked, optimizer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PPO on samples [M, n, ...]. -> means over all minibatches [M]"""
    not_read = ("reward", "value")
    batch = {name: x for name, x in batch.items() if name not in not_read}
    batch = drop_masked(batch, batch["weight"] > 0, args.num_minibatches)
    updates = []
    for _ in range(args.update_epochs):
        order = torch.rand(batch["weight"].shape[1], device=batch["weight"].device).argsort()
        for index in order.tensor_split(args.num_minibatches):
            minibatch = {name: x.index_select(1, index) for name, x in batch.items()}
            loss, metrics = ppo_loss(args, policy, minibatch)
            metrics["losses/grad_norm"] = optimizer_step(optimizer, loss, args.max_grad_norm)
            updates.append(metrics)
    return mean_over_updates(updates)


# ---- Logging. Metrics are tensors on the device, [M] per learner (games/: [S, N]), until
# MetricSums.read. One of your own: metrics["my/name"] = x in train_iteration.


def episode_metrics(seats: game.Seats, episodes: dict) -> dict[str, torch.Tensor]:
    """Sums over the games that ended, per seed and seat [S, N]"""
    prey = episodes["prey"]
    done = episodes["done"][..., None].expand_as(prey)  # [T, B, N]

    def per_seat(x):
        return x.float().unflatten(1, (seats.num_blocks, -1)).sum((0, 2))

    return {
        "games/ended": per_seat(done),
        "games/return": per_seat(done * episodes["return"]),
        "games/length": per_seat(done * episodes["length"][..., None]),
        "games/stag": per_seat(done & (prey == game.HUNT_STAG)),
        "games/hare": per_seat(done & (prey == game.HUNT_HARE)),
    }


def score_prediction(probs, action, weight):
    """probs [M, n, K, 7], what was done [M, n, K, 1] -> mean -log p [M], share of right guesses [M]
    (ties share)"""
    likely = (probs == probs.amax(3, keepdim=True)).float()
    right = (likely / likely.sum(3, keepdim=True)).gather(3, action)[..., 0]
    nll = -probs.gather(3, action)[..., 0].clamp(min=1e-9).log()
    return masked_mean(nll, weight), masked_mean(right, weight)


@torch.no_grad()
def moa_metrics(args: Args, games: Games, networks: Networks, transitions: Transitions, episodes: dict):
    """How well MOA predicts the co-players' actions in fresh games, on every 8th step, beside the
    best that can be known: their own probabilities (ceiling) -> [M]"""
    env = games.env
    stride = min(transitions.done.shape[1], MOA_STRIDE)
    steps = tree_map(lambda x: x[:, stride - 1 :: stride].flatten(1, 2), transitions)
    views = entity_views(env, steps.board, steps.walls)
    clock = steps.time / env.config.final_time
    belief = infer_opponents(args, env, networks, views, clock, steps.history)
    noise = goal_noise(args, *belief.params.shape[:2], device=env.device)
    predicted = predict_actions(args, networks, belief, clock, noise).exp()
    action = steps.joint[..., 1:].long()[..., None]
    weight = belief.present.float()

    true_probs = [games.seats.to_learners(env.seats_to_ego(x))[:, :, 1:] for x in episodes["probs"]]
    true_probs = torch.stack(true_probs, 1).flatten(1, 2)  # [M, n, K, 7]
    nll, top1 = score_prediction(predicted, action, weight)
    ceiling_nll, ceiling_top1 = score_prediction(true_probs, action, weight)
    return {
        "moa/nll": nll,
        "moa/top1": top1,
        "moa/ceiling/nll": ceiling_nll,
        "moa/ceiling/top1": ceiling_top1,
        "omg/subgoal_norm": belief.goals.norm(dim=2).mean(1),
    }


def batch_metrics(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Means over the samples that count; name: real or imagined"""
    weight = (batch["weight"] > 0).float()
    return {
        f"{name}/samples": weight.sum(1),
        f"{name}/share": weight.mean(1),
        f"{name}/reward_mean": masked_mean(batch["reward"], weight),
        f"{name}/return_mean": masked_mean(batch["returns"], weight),
        f"{name}/return_std": variance(batch["returns"], weight).sqrt(),
        f"{name}/value_mean": masked_mean(batch["value"], weight),
    }


def variance(x, weight):
    return masked_mean((x - masked_mean(x, weight)[:, None]).square(), weight)


def explained_variance(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the returns by the values [M]; NaN where there is nothing to explain"""
    weight = (batch["weight"] > 0).float()
    total = variance(batch["returns"], weight)
    explained = 1 - variance(batch["returns"] - batch["value"], weight) / total
    return explained.masked_fill(total < 1e-8, math.nan)


class MetricSums:
    """Sums of metrics since the last row in the logs, on the device"""

    def __init__(self, device):
        self.sums = {}
        self.count = torch.zeros((), device=device)  # how often something was added

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        """The same names each time"""
        for name, x in metrics.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(x, dtype=torch.float32)
        torch._foreach_add_(list(self.sums.values()), [metrics[name].float() for name in self.sums])
        self.count.add_(1.0)

    def read(self) -> dict[str, np.ndarray]:
        """The means over iterations and ranks: the only read from the device"""
        means = {name: (total / self.count).cpu().numpy() for name, total in self.sums.items()}
        ranks = gather_ranks(means)
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in means}

    def reset(self) -> None:
        for total in (*self.sums.values(), self.count):
            total.zero_()

    def state_dict(self) -> dict:
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, saved: dict) -> None:
        """In place: there a CUDA graph adds to them"""
        self.reset()
        self.count.copy_(saved["count"])
        for name, total in saved["sums"].items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(total, device=self.count.device)
            self.sums[name].copy_(total)


def log_row(args: Args, metrics: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """What seed number `seed` logs: `charts/` are means over the games that ended, the rest over
    its learners"""
    ended = metrics["games/ended"][seed][0] or math.nan
    returns = metrics["games/return"][seed] / ended  # [N]
    stag_share = metrics["games/stag"][seed].mean() / ended
    hare_share = metrics["games/hare"][seed].mean() / ended
    table = game.seats_table(args.seats, len(returns))
    learner_returns = returns[[name == "learner" for name in table]]
    row = {
        "charts/episodic_return": learner_returns.mean(),
        "charts/episodic_length": metrics["games/length"][seed][0] / ended,
        "charts/stag_share": stag_share,
        "charts/hare_share": hare_share,
        "charts/nothing_share": 1 - stag_share - hare_share,
        "per_agent/return_gap": learner_returns.max() - learner_returns.min(),
    }
    for i, player_return in enumerate(returns):
        row[f"charts/episodic_return/player_{i}"] = player_return
    for name, value in metrics.items():
        if not name.startswith("games/"):
            learners = np.split(value, args.num_seeds)[seed]
            row[name] = learners.mean()
        if name in PER_LEARNER:
            row |= {f"per_agent/{PER_LEARNER[name]}/learner_{i}": x for i, x in enumerate(learners)}
    return {name: float(value) for name, value in row.items()}


def check_row(row: dict[str, float], where: str) -> None:
    """Stops a run whose loss is no number"""
    for name, value in row.items():
        if name == "losses/explained_variance":
            continue  # a ratio: no number where all returns are equal
        if name.startswith("losses/") and not math.isfinite(value):
            raise FloatingPointError(f"{name} is {value} ({where})")
    if row.get("wm/unknown_reward", 0.0) > 1e-3:
        wrong = "a reward is no payoff of the game: add a bonus in shape_reward, not to env.step"
        raise FloatingPointError(f"{wrong} ({where})")


# ---- Speed, ranks

FUSED = (  # by --compile
    perceive,
    entity_views,
    infer_opponents,
    predict_actions,
    update_history,
    evaluate_policy,
    predict_step,
    ppo_loss,
    gumbel_root_action,
    select_path,
    path_returns,
    update_best,
    predict_opponents,
    env_transition,
)


def fuse(use: bool) -> None:
    """The functions above as torch.compile makes them, or as they are written"""
    if use:
        torch._dynamo.config.recompile_limit = 64  # else it would go on uncompiled after 8 shapes
    for function in FUSED:
        globals()[function.__name__] = torch.compile(function, dynamic=False) if use else function


def capture(function, env: StagHuntEnv, use: bool):
    """The same function; on a GPU the replay of one CUDA graph, whose result stays in place. Call
    it once before."""
    if not use or env.device.type == "cpu":
        return function
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog goes on
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


def capture_graphs(state: "TrainState", stages: dict) -> dict:
    """The same stages as CUDA graphs: warms up, puts everything back, captures"""
    before = copy.deepcopy(state.state_dict())
    with torch.cuda.stream(torch.cuda.Stream()):
        for function in stages.values():
            function()
    torch.cuda.synchronize()
    state.load_state_dict(before)
    torch.cuda.empty_cache()  # graphs have memory of their own: what came before gives its back
    env = state.games.env
    return {name: capture(function, env, True) for name, function in stages.items()}


class Timer:
    """Seconds of each stage. On a GPU the times are events, which a CUDA graph records at each
    replay."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.times = []
        self.record("start")

    def record(self, name: str) -> None:
        now = time.perf_counter()
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True, external=True)
            now.record()
        self.times.append((name, now))

    def seconds(self) -> dict[str, float]:
        if self.cuda:
            torch.cuda.synchronize()
        stages = collections.Counter()
        for (_, begin), (name, end) in itertools.pairwise(self.times):
            stages[f"time/{name}"] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return dict(stages)


def init_ranks(device: torch.device) -> tuple[int, int, torch.device]:
    """Under torchrun: meets the other processes. -> this one's rank, how many there are, its
    device"""
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if device.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), device


def rank_share(args: Args, num_ranks: int) -> Args:
    """The games and batches of one rank; a batch of two or more stays one, for games of either
    kind"""

    def batch_share(size):
        return max(math.ceil(size / num_ranks), min(2, size))

    return dataclasses.replace(
        args,
        num_envs=math.ceil(args.num_envs / num_ranks),
        subgoal_batch_size=batch_share(args.subgoal_batch_size),
        wm_batch_size=batch_share(args.wm_batch_size),
    )


def gather_ranks(value, everywhere: bool = True) -> list | None:
    """What each rank has, once all have it; else only on the first rank, None on the others"""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    if everywhere:
        dist.all_gather_object(values, value)
        return values
    dist.gather_object(value, values if dist.get_rank() == 0 else None)
    return values if dist.get_rank() == 0 else None


# ---- One iteration


@dataclasses.dataclass
class TrainState:
    """All that a run changes"""

    args: Args
    networks: Networks
    optimizers: dict[str, Adam]
    games: Games  # the learners' own
    watched: Games | None  # of rule-based players: the models must not forget them
    eps: torch.Tensor  # [] share of hindsight subgoals in MOA's training
    horizon: torch.Tensor  # int64 [M] how many steps may be imagined
    metrics: MetricSums

    def state_dict(self) -> dict:
        """The run's own tensors, and copies of what its generators hold"""
        optimizers = self.optimizers.items()
        saved = {
            "networks": {name: x.state_dict() for name, x in self.networks.present().items()},
            "optimizers": {name: dict(enumerate(x.state.values())) for name, x in optimizers},
            "games": self.games.state_dict(),
            "eps": self.eps,
            "horizon": self.horizon,
            "metrics": self.metrics.state_dict(),
            "cpu_random": torch.get_rng_state(),
        }
        if self.watched is not None:
            saved["watched"] = self.watched.state_dict()
        if self.eps.is_cuda:
            saved["cuda_random"] = torch.cuda.get_rng_state(self.eps.device)
        return saved

    def load_state_dict(self, saved: dict) -> None:
        """Everything in place, before a CUDA graph looks for it there. A replay may be empty, here
        or there, and so may the sums of metrics."""
        kept = self.state_dict()
        del kept["metrics"]["sums"]
        replays = {"games": self.games.replay}
        if self.watched is not None:
            replays["watched"] = self.watched.replay
        for name in replays:
            del kept[name]["replay"]
        game.copy_nested_(kept, saved)
        for name, replay in replays.items():
            replay.load_state_dict(saved[name]["replay"])
        self.metrics.load_state_dict(saved["metrics"])
        self.games.env.generator.set_state(saved["games"]["env"]["generator"])
        torch.set_rng_state(saved["cpu_random"])
        if self.eps.is_cuda:
            torch.cuda.set_rng_state(saved["cuda_random"], self.eps.device)


def seed_everything(seeds: list[int], rank: int, stream: int) -> None:
    """stream: games of another number are other games"""
    torch.manual_seed(1_000_003 * seeds[0] + 7919 * rank + 97 * stream)


def make_train_state(args: Args, tables: list[list[str]], seeds: list[int], device, rank: int = 0) -> TrainState:
    """Everything allocated. tables: who sits where, N names for each block of --num-envs games"""
    seed_everything(seeds, rank, stream=0)
    games = Games(args, tables, device)
    m = games.seats.num_learners
    network_seeds = [100 * seed + i for seed in seeds for i in range(m // len(seeds))]
    networks = make_networks(args, network_seeds, device)
    policy = networks.policy.parameters()
    optimizers = {"policy": Adam(policy, args.learning_rate, eps=1e-5)}
    if networks.moa is not None:
        learned = networks.inference.parameters() + networks.moa.parameters()
        optimizers["opponents"] = Adam(learned, args.subgoal_learning_rate)
    if networks.world is not None:
        world = networks.world.parameters()
        optimizers["world"] = Adam(world, args.wm_learning_rate, beta2=0.99)
    watched = None
    if networks.moa is not None and args.offline_ratio > 0:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed_everything(seeds, rank, stream=1)
            half = dataclasses.replace(args, num_envs=math.ceil(args.num_envs / 2))
            watched = Games(half, tables, device, watch=True, teams=True)
        watched.env.generator = games.env.generator  # a CUDA graph knows of one
    return TrainState(
        args=args,
        networks=networks,
        optimizers=optimizers,
        games=games,
        watched=watched,
        eps=torch.zeros((), device=device),
        horizon=torch.zeros(m, dtype=torch.int64, device=device),
        metrics=MetricSums(device),
    )


def load_pretrained(args: Args, networks: Networks) -> None:
    """Weights of the pretraining scripts. Seed s takes those of their seed s, from the first again
    where there are fewer. Refuses what is missing, damaged or does not fit"""
    flags = vars(args) | vars(args.config) | {"world_model": WorldModel.__name__}
    for name, (expected, network_names) in PRETRAINED.items():
        path = getattr(args, name)
        if path is None:
            continue
        misfit = f"{game.flag(name)} {path} does not fit"
        game.find_checkpoint(path, game.flag(name))
        saved = game.load_checkpoint(path, expected)
        for key, there in saved["must_match"].items():
            here = flags.get(key)
            refuse(there != here, f"{misfit}: {key} {there}, here {here}")
        for network_name in network_names:
            network = getattr(networks, network_name)
            weights = saved["networks"][network_name]
            learners_per_seed = len(network) // args.num_seeds
            seed = torch.arange(len(network)) // learners_per_seed
            index = seed % min(len(x) for x in weights.values())
            try:
                network.load_state_dict({key: x[index] for key, x in weights.items()})
            except game.UserError as error:
                raise game.UserError(f"{misfit}: {error}") from error


def pretrain(args: Args, state: TrainState, seeds: list[int], rank: int) -> dict[str, float]:
    """One model per seed learns from games of rule-based players; each of its learners starts from
    a copy. -> metrics on fresh games"""
    device = state.games.env.device
    table = game.seats_table(args.seats, args.config.num_players)
    args = dataclasses.replace(
        args,
        num_envs=args.pretraining_games,
        share_parameters=True,
        compile=False,
    )
    seed_everything(seeds, rank, stream=2)
    games = Games(args, [table] * len(seeds), device, watch=True)
    networks = make_networks(args, [100 * seed for seed in seeds], device, pretraining=True)
    load_pretrained(args, networks)
    optimizers = {}
    rates = {"opponents": 3e-3, "world": 2e-3}
    if args.vae_checkpoint is None:
        names = ("inference", "moa", "prior", "moa_prior")
        learned = itertools.chain(*(getattr(networks, name).parameters() for name in names))
        optimizers["opponents"] = Adam(list(learned), 0.0)
    if args.world_model_checkpoint is None and networks.world is not None:
        optimizers["world"] = Adam(networks.world.parameters(), 0.0, beta2=0.99)

    def play():
        return rollout(args, games, networks, args.num_steps)

    def learn():
        if "opponents" in optimizers:
            models = games.env, networks, optimizers["opponents"], games.replay
            train_opponent_models(args, *models, None, eps=0.0, updates=1, pretraining=True)
        if "world" in optimizers:
            train_world_model(args, networks, optimizers["world"], games.replay, None, updates=1)

    rounds = max(1, min(8, args.pretraining_updates // 10))
    for number in tqdm(range(rounds), desc="pretraining", unit="round", leave=False, disable=rank > 0):
        games.replay.push(play()[0])
        for name, optimizer in optimizers.items():  # falls along a cosine
            rate = rates[name] * 0.5 * (1 + math.cos(math.pi * number / rounds))
            optimizer.param_groups[0]["lr"].fill_(rate)
        updates = args.pretraining_updates * (number + 1) // rounds
        updates -= args.pretraining_updates * number // rounds
        if number == 0 and updates > 0:
            learn()
            updates -= 1
            play = capture(play, games.env, args.cudagraphs)
            learn = capture(learn, games.env, args.cudagraphs)
        for _ in range(updates):
            learn()
    learners_each = len(state.networks.policy) // len(seeds)
    learner_seed = torch.arange(len(seeds), device=device).repeat_interleave(learners_each)
    for name, network in state.networks.present().items():
        if name != "policy":
            weights = getattr(networks, name).state_dict()
            network.load_state_dict({key: x[learner_seed] for key, x in weights.items()})
    if state.watched is not None:
        for _ in range(args.replay_rollouts):
            watch_rule_based(state)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # measuring changes no run
        transitions, _, episodes = play()
        metrics = moa_metrics(args, games, networks, transitions, episodes)
        if networks.world is not None:
            metrics |= measure_horizon(args, networks, transitions)[1]
    return {name: float(x.mean()) for name, x in metrics.items()}


def watch_rule_based(state: TrainState) -> None:
    """A rollout of rule-based games, with the learners' present idea of who plays, for the models'
    training"""
    transitions, _, _ = rollout(state.args, state.watched, state.networks, state.args.num_steps)
    state.watched.replay.push(transitions)


def imagine_batch(state: TrainState) -> dict[str, torch.Tensor]:
    """Imagined samples for PPO, so many that --ppo-real-ratio of all are real"""
    args = state.args
    env = state.games.env
    real_ratio = args.ppo_real_ratio or 0.5  # 0: as many as there would be real ones
    real_samples = args.num_steps * state.games.last_joint.shape[1]
    samples_wanted = real_samples * (1 - real_ratio) / real_ratio
    rows = math.ceil(samples_wanted / args.imagination_horizon)
    num_windows = math.ceil(4 * rows / args.num_steps)  # a row holds one rollout after another
    offline = None
    if state.watched is not None:
        offline = state.watched.replay
        num_windows = max(num_windows, 2)  # one of each kind
    windows = sample_replays(state.games.replay, offline, args.watched_starts, num_windows, window=1)
    starts = replayed_states(args, env, state.networks, windows)
    samples = imagine(args, env, state.networks, starts, rows, state.horizon)
    return make_ppo_batch(args, samples, real=False)


def train_iteration(state: TrainState) -> dict:
    """One iteration; captured as one CUDA graph, nothing in it waits for the host. -> its samples
    and timer"""
    args = state.args
    networks = state.networks
    env = state.games.env
    timer = Timer(env.device)
    transitions, outputs, episodes = rollout(args, state.games, networks, args.num_steps, timer=timer)
    metrics = episode_metrics(state.games.seats, episodes)
    if args.planner != "none":
        mask = learner_mask(env.config, transitions.board)
        gain, kl, depth = outputs["search"].unbind(3)
        metrics["search/gain"] = masked_mean(gain, mask)
        metrics["search/kl"] = masked_mean(kl, mask)
        metrics["search/depth"] = masked_mean(depth, mask)
    timer.record("rollout")

    if networks.moa is not None:
        metrics |= moa_metrics(args, state.games, networks, transitions, episodes)
    if networks.world is not None:  # on fresh steps, before they are trained on
        horizon, match = measure_horizon(args, networks, transitions)
        anybody = learner_mask(env.config, transitions.board[:, 0]).any(1)
        state.horizon.copy_(torch.where(anybody, horizon, state.horizon))  # else nothing was measured
        metrics |= match
    timer.record("measure")

    replay = state.games.replay
    offline = state.watched.replay if state.watched is not None else None
    if networks.moa is not None:
        replay.push(transitions)
    if networks.world is not None:
        optimizer = state.optimizers["world"]
        metrics |= train_world_model(args, networks, optimizer, replay, offline, args.wm_updates)
    if networks.moa is not None:
        models = env, networks, state.optimizers["opponents"], replay, offline
        metrics |= train_opponent_models(args, *models, state.eps, args.subgoal_updates)
    timer.record("models")

    real = make_ppo_batch(args, real_samples(args, env.config, transitions, outputs), real=True)
    samples = {"transitions": transitions, "outputs": outputs, "real": real, "timer": timer}
    batch = real
    metrics |= batch_metrics("real", real)
    metrics["losses/explained_variance"] = explained_variance(real)
    if args.imagination and args.ppo_real_ratio < 1:
        imagined = samples["imagined"] = imagine_batch(state)
        metrics |= batch_metrics("imagined", imagined)
        batch = imagined
        if args.ppo_real_ratio > 0:
            batch = {name: torch.cat([real[name], imagined[name]], 1) for name in real}
    timer.record("imagine")

    metrics |= ppo_update(args, networks.policy, state.optimizers["policy"], batch)
    timer.record("ppo")
    state.metrics.add(metrics)
    return samples


# ---- Main


def resume_run(args: Args, device: torch.device, num_ranks: int) -> tuple[Args, dict]:
    """-> the flags with the path of the checkpoint, the checkpoint"""
    args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
    checkpoint = game.load_checkpoint(args.resume, FORMAT)
    game.check_resume(args, load_args(args.resume, checkpoint["args"]), MAY_CHANGE)
    steps = checkpoint["iteration"] * args.num_envs * args.num_steps
    refuse(steps > total_steps(args), f"--total-timesteps {args.total_timesteps}: the run has {steps} already")
    kind = checkpoint["device"]
    ranks = len(checkpoint["states"])
    elsewhere = (kind, ranks) != (device.type, num_ranks)
    refuse(elsewhere, f"--resume {args.resume} goes on on {ranks} rank(s) on {kind} only")
    return args, checkpoint


def total_steps(args: Args) -> int:
    """--total-timesteps as whole iterations"""
    each = args.num_envs * args.num_steps
    return math.ceil(args.total_timesteps / each) * each


def script_version() -> dict[str, str]:
    text = Path(__file__).read_bytes()
    return {"name": Path(__file__).name, "sha256": hashlib.sha256(text).hexdigest()}


def load_state(args: Args, state: TrainState, checkpoint: dict, rank: int, say) -> None:
    """What a resumed run goes on from"""
    state.load_state_dict(checkpoint["states"][rank])
    made_by = checkpoint["script"]
    if made_by != script_version():
        say(f"{args.resume} was made by another text than this script: {made_by['name']}")


def prepare(args: Args, state: TrainState, seeds: list[int], rank: int, say) -> None:
    """Pretrains the models, where there are any and something asks for it"""
    loads = args.vae_checkpoint or args.world_model_checkpoint
    wanted = args.pretraining_updates or args.offline_ratio or loads
    if state.networks.moa is None or not wanted:
        return
    say(f"pretraining the models on rule-based games, {args.pretraining_updates} updates")
    metrics = pretrain(state.args, state, seeds, rank)
    shown = ("moa/nll", "moa/top1", "wm/horizon")
    texts = [f"{name} {metrics[name]:.4g}" for name in shown if name in metrics]
    say(f"on fresh rule-based games: {', '.join(texts)}")


def save_run(run: game.Run | None, args: Args, state, iteration: int, seconds: float) -> None:
    """A checkpoint of all ranks"""
    on_host = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, state.state_dict())
    states = gather_ranks(on_host, everywhere=False)
    if run is not None:
        content = {
            "format": FORMAT,
            "args": dataclasses.asdict(args),
            "iteration": iteration,
            "device": state.eps.device.type,
            "states": states,
            "script": script_version(),
            "seconds": seconds,
        }
        run.save(content)
    gather_ranks(None)  # nobody goes on, or ends, before it is written


@game.never_fatal("write to TensorBoard")
def add_histograms(run: game.Run, samples: dict, step: int) -> None:
    """Of rewards, returns and values, real and imagined"""
    for name in {"real", "imagined"} & samples.keys():
        for seed, writer in enumerate(run.writers):
            batch = {key: x.chunk(len(run.writers))[seed] for key, x in samples[name].items()}
            counts = batch["weight"] > 0
            for key in ("reward", "returns", "value") if counts.any() else ():
                writer.add_histogram(f"{name}/{key}", batch[key][counts].cpu(), step)


def main(args: Args) -> dict[str, float]:
    """Returns the last logged metrics, averaged over seeds."""
    start = game.Stopwatch()
    config = validate(args)
    rank, num_ranks, device = init_ranks(game.resolve_device(args.device))
    refuse(args.num_envs % num_ranks > 0, f"--num-envs {args.num_envs} must be a multiple of the {num_ranks} ranks")
    checkpoint = None
    iteration = 0
    seconds = 0.0
    if args.resume is None:
        game.check_run_flags(args)
    else:
        args, checkpoint = resume_run(args, device, num_ranks)
        iteration = checkpoint["iteration"]
        seconds = checkpoint["seconds"]
    say = tqdm.write if rank == 0 else lambda _: None
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order in each run
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    rank_args = rank_share(args, num_ranks)
    rank_args.compile = args.compile and device.type == "cuda"
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    table = game.seats_table(args.seats, config.num_players)
    state = make_train_state(rank_args, [table] * len(seeds), seeds, device, rank)
    if checkpoint is None:
        load_pretrained(rank_args, state.networks)
    else:
        load_state(args, state, checkpoint, rank, say)
    start.record("networks")
    learners = state.games.seats.num_learners
    say(f"{config.setting}, {args.method}, {learners} learner(s), on {num_ranks} x {device.type}")
    steps_each = args.num_envs * args.num_steps
    num_iterations = total_steps(args) // steps_each
    step = iteration * steps_each
    run = None
    with contextlib.ExitStack() as held:
        if rank == 0:
            run = game.Run(args, f"{config.setting}_{args.method}", checkpoint, step)
            held.callback(run.close)
        if checkpoint is None:
            prepare(args, state, seeds, rank, say)
        start.record("pretraining")
        stages = {"train": functools.partial(train_iteration, state)}
        if state.watched is not None:
            stages["watch"] = functools.partial(watch_rule_based, state)
        if rank_args.compile:
            say("compiling takes about a minute, the second time less: torch keeps what it compiled")
        fuse(rank_args.compile)
        if device.type == "cuda" and args.cudagraphs:
            stages = capture_graphs(state, stages)
        start.record("graphs")
        ready = sum(start.stages.values())
        if run is not None:
            stages_text = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.stages.items())
            say(f"ready after {ready:.1f} s ({stages_text}); run folder {run.folders[0]}")
        stop = held.enter_context(game.stop_requests())
        bar = tqdm(
            initial=step,
            total=total_steps(args),
            unit="step",
            unit_scale=True,
            mininterval=1,
            disable=rank > 0,
        )
        held.enter_context(bar)
        began = time.monotonic() - seconds
        last_save = time.monotonic()
        asked = False
        rows = [{}]
        last_row = iteration - iteration % args.log_every
        while iteration < num_iterations and not asked:
            decay = 0.9 * args.anneal_lr * iteration / num_iterations
            learning_rate = args.learning_rate * (1 - decay)
            state.optimizers["policy"].param_groups[0]["lr"].fill_(learning_rate)
            state.eps.fill_(args.hindsight_eps * max(0.0, 1 - 2 * iteration / num_iterations))
            if "watch" in stages and iteration % args.replay_rollouts == 0:
                stages["watch"]()
            samples = stages["train"]()
            iteration += 1
            overdue = time.monotonic() - last_save >= args.save_seconds
            ranks = gather_ranks((bool(stop), overdue))
            asked = any(stopped for stopped, _ in ranks)
            last = iteration == num_iterations
            save_due = ranks[0][1] or asked or last
            log_due = iteration % args.log_every == 0 or last
            if not (log_due or save_due):
                continue
            step = iteration * steps_each
            metrics = state.metrics.read()
            seconds = time.monotonic() - began
            rows = [log_row(args, metrics, seed) for seed in range(args.num_seeds)]
            speed = {
                "charts/SPS": step / (seconds or math.nan),
                "charts/learning_rate": learning_rate,
                "time/training": seconds,
                "time/ready": ready,
                **{f"time/start/{name}": x for name, x in start.stages.items()},
                **samples["timer"].seconds(),
            }
            if log_due:
                state.metrics.reset()
                if run is not None:
                    run.log(step, [row | speed for row in rows])
            for seed, row in zip(seeds, rows, strict=True):
                check_row(row, f"seed {seed}, iteration {iteration}")
            mean_return = np.mean([row["charts/episodic_return"] for row in rows])
            stag_share = np.mean([row["charts/stag_share"] for row in rows])
            shown = f"return {mean_return:.3f}, stag share {stag_share:.2f}"
            if math.isnan(mean_return):
                shown = "no game has ended yet"
            bar.set_postfix_str(shown, refresh=False)
            bar.update(step - bar.n)
            if save_due:
                save_run(run, args, state, iteration, seconds)
                last_save = time.monotonic()
            if log_due:
                drawn = PICTURES * last_row // num_iterations
                if run is not None and PICTURES * iteration // num_iterations > drawn:
                    add_histograms(run, samples, step)
                last_row = iteration
            began = time.monotonic() - seconds  # pictures and checkpoints are no training
    path = gather_ranks(run and str(run.folders[0] / "checkpoint.pt"))[0]
    if asked and iteration < num_iterations:
        say(f"stopped; go on with: {shlex.join(['python', sys.argv[0], '--resume', path])}")
        raise SystemExit(128 + (stop or [signal.SIGTERM])[0])
    say(f"{seconds:.1f} s of training after {ready:.1f} s of preparation; checkpoint {path}")
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {"checkpoint": path, **means}


if __name__ == "__main__":
    game.command_line(parse_args, main)
    if dist.is_initialized():
        dist.destroy_process_group()
