"""Mistakes, and what else only an experiment wants, as edits of the text of hopplus_ppo.py or hopplus_mcts.py: what
stands there once -> what stands there instead."""

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import refuse

ROOT = Path(__file__).resolve().parent.parent
PPO_BATCH = "    return {name: x.flatten(1, 2) for name, x in batch.items()}\n"
IMAGINED_BELIEF = "        belief, output = perceive(args, env, networks, infer_opponents, *situation)\n"
CLIPPED = "    return next_board, reward.clamp(min(config.payoffs()), max(config.payoffs())), reward\n"
MASKED = "        return logits.float().masked_fill(~legal, -1e9).log_softmax(2)\n"
WEIGHT = "    weight = row_weights(windows.done, present[:, : shape[1]])\n"
MOA_STEP = '        optimizer_step(optimizer, losses["loss"], 1.0)\n'
MOA_LEARNS = "    log_probs = moa(rows.board, rows.walls, clock, goal, rows.legal)\n"
AFTER_WORLD_MODEL = "\n\ndef select_head("
GAME_STEP = "        reward, present_before, done = env.advance(actions)\n"
REAL_REWARD = "shape_reward(args, config, transitions.reward, board, transitions.joint, next_board)"
BEFORE_ITERATION = "def train_iteration(state: TrainState) -> dict:\n"
FRESH = '    metrics["losses/explained_variance"] = explained_variance(real)\n'
IMAGINED_END = """
        ended, first_hunt = imagined_end(config, board, next_board, time_next, now["first_hunt"])
"""
COUNT_HARES = '        "games/hare": per_seat(done & (prey == game.HUNT_HARE)),\n'
HARE_SHARE = '        "charts/hare_share": hare_share,\n'
BEFORE_GAMES = "class Games:\n"
MAKE_SEATS = "        self.seats = game.Seats(\n"
FINAL_RETURN = '                "return": env.final_return.clone(),\n'
FINAL_PREY = """                "prey": env.final_prey,
            }
        )
"""

OF_PLAYER_1 = """    batch = {name: x.flatten(1, 2) for name, x in batch.items()}
    if not real:
        return batch
    learner = torch.arange(len(weight), device=weight.device)
    first = learner - learner % args.config.num_players
    return {name: x[first] for name, x in batch.items()}
"""
WITHOUT_GOALS = """
        def without_goals(*given):
            belief = infer_opponents(*given)
            return belief._replace(goals=torch.zeros_like(belief.goals))

        belief, output = perceive(args, env, networks, without_goals, *situation)
"""
ALL_STEPS = "    weight = row_weights(windows.done, torch.ones_like(present[:, : shape[1]]))\n"
REWARDED = """    leaves = exited(env.config, with_future.board, with_future.next_board)[:, None, ..., 1:]
    rewarded = (same_game(with_future.done)[:, : shape[1]] & leaves).any(2)
    weight = row_weights(windows.done, present[:, : shape[1]] & rewarded)
"""
STEP_OF_PLAYER_1 = f"""        learner = torch.arange(len(losses["loss"]), device=env.device)
        learns = (learner % args.config.num_players == 0) | pretraining
        losses["loss"] = torch.where(learns, losses["loss"], 0.0)
{MOA_STEP}"""
OTHER_ORDER = """    action_id = torch.arange(7, device=goal.device)
    number = torch.where(action_id < game.STAY, action_id + 1, 11 - action_id)  # hare before stag
    number = number.masked_fill(action_id == game.STAY, 0)  # stay first
    legal = rows.legal[..., number.argsort()]
    log_probs = moa(rows.board, rows.walls, clock, goal, legal)[..., number]
"""
PAY_PLAYER_1 = f"""{GAME_STEP}        output["reward_of_player_1"] = seats.per_learner(reward[:, 0])
"""
READ_PLAYER_1 = 'outputs["reward_of_player_1"]'
OLD_BATCHES = f"""OLD_BATCHES = 16


def stored_rows(state: TrainState, new: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    \"""As many rows as are new [M, n, ...], drawn from the last batches as they were stored\"""
    store = state.games.replay
    weight = new["weight"]
    if not hasattr(store, "batches"):
        store.batches = {{name: x.new_zeros(OLD_BATCHES, *x.shape) for name, x in new.items()}}
        store.num_batches = torch.zeros((), dtype=torch.int64, device=weight.device)
    for name, x in new.items():
        store.batches[name].index_copy_(0, (store.num_batches % OLD_BATCHES)[None], x[None])
    store.num_batches.add_(1)
    slot, row = torch.rand(2, *weight.shape, device=weight.device)
    slot = (slot * store.num_batches.clamp(max=OLD_BATCHES)).long()
    row = (row * weight.shape[1]).long()
    learner = torch.arange(len(weight), device=weight.device)[:, None]
    return {{name: x[slot, learner, row] for name, x in store.batches.items()}}


{BEFORE_ITERATION}"""
TRAIN_ON_STORED = f"""{FRESH}    real = stored_rows(state, real)
    batch = real
"""
NEVER_ENDED = f"{IMAGINED_END}        ended = torch.zeros_like(ended)\n"
EVERYTHING_LEGAL = f"""{IMAGINED_BELIEF}        belief = belief._replace(legal=torch.ones_like(belief.legal))
        output["legal"] = torch.ones_like(output["legal"])
        output["log_probs"], _ = networks.policy(output["inputs"], output["legal"])
"""
PARTY = "(prey == game.HUNT_STAG).sum(2, keepdim=True)"  # in each game that ended
COUNT_PARTIES = f"""{COUNT_HARES}        "games/party_2": per_seat(done & ({PARTY} == 2)),
        "games/party_3": per_seat(done & ({PARTY} == 3)),
        "games/party_4": per_seat(done & ({PARTY} == 4)),
"""
PARTY_SHARES = f"""{HARE_SHARE}        "charts/party_2": metrics["games/party_2"][seed][0] / ended,
        "charts/party_3": metrics["games/party_3"][seed][0] / ended,
        "charts/party_4": metrics["games/party_4"][seed][0] / ended,
"""
PERMUTED_SEATS = f"""class PermutedSeats(game.Seats):
    \"""Of a block's learners each sits somewhere else in the next game\"""

    seat_of = None  # int64 [B, N]: where each learner of the block sits

    def __init__(self, env, *given, **options):
        super().__init__(env, *given, **options)
        refuse(not self.everybody_learns, "permuted_seats: all players must be learners")
        self.seat_of = torch.rand(self.kinds.shape, device=env.device).argsort(1)

    def by_learner(self, x):
        if self.seat_of is None:
            return x
        number = torch.arange(len(x), device=x.device)[:, None]
        return x[number, self.seat_of]

    def to_learners(self, x):
        return super().to_learners(self.by_learner(x))

    def to_seats(self, x, others=None):
        x = super().to_seats(x, others)
        number = torch.arange(len(x), device=x.device)[:, None]
        return x[number, self.seat_of.argsort(1)]

    def change_seats(self, done):
        drawn = torch.rand(self.seat_of.shape, device=done.device).argsort(1)
        self.seat_of.copy_(torch.where(done[:, None], drawn, self.seat_of))

    def state_dict(self):
        return {{**super().state_dict(), "seat_of": self.seat_of}}


{BEFORE_GAMES}"""
MAKE_PERMUTED_SEATS = """
        refuse(needs_models(args), "permuted_seats: who models the others would mistake them")
        self.seats = PermutedSeats(
"""
RETURN_BY_LEARNER = """                "return": seats.by_learner(env.final_return),
"""
PREY_BY_LEARNER = """                "prey": seats.by_learner(env.final_prey),
            }
        )
        seats.change_seats(done)
"""


def pixel_world_model(channel_weights: tuple[float, ...] | None) -> str:
    """The world model of pretrain_world_model.py that predicts every cell"""
    return f"""

import pretrain_world_model


class PixelWorldModel(pretrain_world_model.PixelWorldModel):
    def __init__(self, config, args):
        changes = {{"wm_hidden": args.wm_hidden, "wm_channel_weights": {channel_weights}}}
        super().__init__(config, pretrain_world_model.make_args(**changes))


WorldModel = PixelWorldModel
{AFTER_WORLD_MODEL}"""


PATCHES = {
    # Everybody trains on player 1's data.
    "one_player": {PPO_BATCH: OF_PLAYER_1},
    # In imagined rollouts the policy reads zeros instead of subgoals.
    "zero_subgoals": {IMAGINED_BELIEF: WITHOUT_GOALS},
    # Imagined rewards are what the world model says, not clipped to the game's payoffs.
    "unclipped": {CLIPPED: "    return next_board, reward, reward\n"},
    # MOA may predict actions that are not legal.
    "unmasked": {MASKED: "        return logits.float().log_softmax(2)\n"},
    # MOA and q_phi also learn from the steps after a co-player left.
    "all_steps": {WEIGHT: ALL_STEPS},
    # MOA and q_phi only learn from games in which the co-player took prey.
    "rewarded": {WEIGHT: REWARDED},
    # The other players' MOA and q_phi stay as they were after the pretraining, which is one for all.
    "moa_of_player_1": {MOA_STEP: STEP_OF_PLAYER_1},
    # MOA learns the actions in another order than the one it is read in.
    "permuted_actions": {MOA_LEARNS: OTHER_ORDER},
    # The world model predicts every cell and the reward by mean squared error.
    "pixel": {AFTER_WORLD_MODEL: pixel_world_model(None)},
    # The same; an error in the players' planes counts twice.
    "pixel_weighted": {AFTER_WORLD_MODEL: pixel_world_model((2, 2, 2, 2, 1, 1, 1))},
    # Beside a learner's own observations and values stand the rewards of player 1.
    "reward_of_player_1": {GAME_STEP: PAY_PLAYER_1, REAL_REWARD: READ_PLAYER_1},
    # PPO learns from steps of the last 16 iterations, with the log-probabilities, values and returns of that time.
    "replayed": {BEFORE_ITERATION: OLD_BATCHES, FRESH: TRAIN_ON_STORED},
    # Imagined games never end, also if the learner has left or time is up.
    "no_ends": {IMAGINED_END: NEVER_ENDED},
    # In imagination the learner and its co-players may do anything.
    "all_legal": {IMAGINED_BELIEF: EVERYTHING_LEGAL},
    # No mistake: also logs the share of games in which two, three and four take the stag.
    "party_sizes": {COUNT_HARES: COUNT_PARTIES, HARE_SHARE: PARTY_SHARES},
    # No mistake: the learners of PPO change seats after each game; returns by player are returns by learner.
    "permuted_seats": {
        BEFORE_GAMES: PERMUTED_SEATS,
        MAKE_SEATS: MAKE_PERMUTED_SEATS,
        FINAL_RETURN: RETURN_BY_LEARNER,
        FINAL_PREY: PREY_BY_LEARNER,
    },
}


def patched_script(script: str, patches: dict[str, dict[str, str]]) -> ModuleType:
    """The script with edits, name -> what is replaced by what"""
    path = ROOT / script
    text = path.read_text()
    for name, edits in patches.items():
        for before, after in edits.items():
            refuse(text.count(before) != 1, f"--patched {name}: {script} no longer has once:\n{before}")
            text = text.replace(before, after)
    module = ModuleType(f"patched_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where its dataclasses look for their module
    exec(compile(text, path, "exec"), vars(module))
    return module
