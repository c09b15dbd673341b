"""Strangers: rule-based players that belong to no population that learners train with.

`noisy_stag` and `noisy_hare` do one action in five as `random`. `waiting` walks to the nearest stag
and stays there; without a stag it stays. `left_stag` hunts the living stag that is farthest to the
left, of several the nearest. `switching` is `nearest_stag` in one game and `nearest_hare` in the
next. Whoever imports this module, scripts that are loaded as modules included, can seat them all.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from stag_hunt_env import FAR, HUNT_HARE, HUNT_STAG, STAY, hunter_probs

import torch


def noisy_probs(env, state, legal, prey, noise=0.2):
    probs = hunter_probs(env, state, legal, prey)
    return (1 - noise) * probs + noise * legal / legal.sum(-1, keepdim=True)


def waiting_probs(env, state, legal):
    distance = env.distance_to_prey(state, HUNT_STAG).gather(1, state.position.long())
    walks = (distance > 0) & (distance < FAR)
    probs = hunter_probs(env, state, legal, HUNT_STAG)
    return torch.where(walks[..., None], probs, (env.action == STAY).float())


def left_stag_probs(env, state, legal):
    column = state.prey_position % env.config.width
    is_stag = state.prey_alive & (env.hunt_action == HUNT_STAG)
    farther = is_stag[:, None] & (column[:, None] < column[..., None])  # [B, P, P]
    alive = state.prey_alive & ~(is_stag & farther.any(2))
    return hunter_probs(env, state._replace(prey_alive=alive), legal, HUNT_STAG)


STRANGER_PROBS = {
    "noisy_stag": partial(noisy_probs, prey=HUNT_STAG),
    "noisy_hare": partial(noisy_probs, prey=HUNT_HARE),
    "waiting": waiting_probs,
    "left_stag": left_stag_probs,
}
STRANGERS = (*STRANGER_PROBS, "switching")
known_seats_table = game.seats_table


def seats_table(seats, num_players, others=("learner", "mixed", "switching")):
    return known_seats_table(seats, num_players, others)


class SwitchingSeats(game.Seats):
    """Seats in which `switching` may sit, too"""

    def __init__(self, env, tables, *args, **options):
        tables = [seats_table(table, env.config.num_players) for table in tables]
        stand_in = {"switching": "nearest_stag"}
        seated = [[stand_in.get(name, name) for name in table] for table in tables]
        super().__init__(env, seated, *args, **options)
        switches = [[name == "switching" for name in table] for table in tables]
        switches = torch.tensor(switches, device=env.device) & (not self.watch)
        self._switches = switches.repeat_interleave(self.num_envs, 0)  # [B, N]
        self._both = 0
        if not switches.any():
            return
        hunters = ("nearest_stag", "nearest_hare")
        self.names += [name for name in hunters if name not in self.names]
        stag = self.names.index("nearest_stag")
        hare = self.names.index("nearest_hare")
        self._both = stag + hare
        hunts_stag = torch.rand(self.kinds.shape, device=env.device) < 0.5
        first = torch.where(hunts_stag, stag, hare)
        self.kinds = torch.where(self._switches, first, self.kinds)

    def update(self, done):
        super().update(done)
        ended = self._switches & done[:, None]
        self.kinds.copy_(torch.where(ended, self._both - self.kinds, self.kinds))


game.PLAYER_PROBS.update(STRANGER_PROBS)
game.seats_table = seats_table
game.Seats = SwitchingSeats
