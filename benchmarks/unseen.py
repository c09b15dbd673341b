"""adapt.py beside six kinds of players that were written when all settings were fixed.

    python benchmarks/unseen.py runs/RUN --best-response-steps 8000000

`slow_stag` stays in every second step, else it is `nearest_stag`. `gives_up` hunts the stag for 12
steps, then hares. `cautious` hunts the stag while no hare is nearer, `contrarian` while nobody else
is at a stag or beside it. `far_hare` hunts the hare that is farthest from all stags. `wanderer` walks
about and hunts what it meets.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation import adapt
from stag_hunt_env import HUNT_HARE, HUNT_STAG, PLAYER_PROBS, STAY, hunter_probs

import torch
import tyro


def distance(env, state, prey):
    """From each player to the nearest such prey [B, N]"""
    return env.distance_to_prey(state, prey).gather(1, state.position.long())


def either(env, state, legal, stag):
    """The stag where that is true [B, N], else hares"""
    hunts_stag = hunter_probs(env, state, legal, HUNT_STAG)
    return torch.where(stag[..., None], hunts_stag, hunter_probs(env, state, legal, HUNT_HARE))


def slow_stag(env, state, legal):
    stays = (env.action == STAY).float()
    return (stays + hunter_probs(env, state, legal, HUNT_STAG)) / 2


def gives_up(env, state, legal):
    return either(env, state, legal, (state.time < 12)[:, None].expand_as(state.position))


def cautious(env, state, legal):
    return either(env, state, legal, distance(env, state, HUNT_STAG) <= distance(env, state, HUNT_HARE))


def contrarian(env, state, legal):
    near = (distance(env, state, HUNT_STAG) <= 1) & state.present
    return either(env, state, legal, near.sum(1, keepdim=True) == near.int())


def far_hare(env, state, legal):
    far = env.distance_to_prey(state, HUNT_STAG).gather(1, state.prey_position.long())
    far = far.masked_fill(~state.prey_alive | (env.hunt_action == HUNT_STAG), -1)
    nearer = (far[..., None] < far[:, None]).any(2)
    return hunter_probs(env, state._replace(prey_alive=state.prey_alive & ~nearer), legal, HUNT_HARE)


def wanderer(env, state, legal):
    hunts = legal & (env.action >= HUNT_STAG)
    choices = torch.where(hunts.any(-1, keepdim=True), hunts, legal)
    return choices / choices.sum(-1, keepdim=True)


KINDS = {kind.__name__: kind for kind in (slow_stag, gives_up, cautious, contrarian, far_hare, wanderer)}


@dataclasses.dataclass
class Args(adapt.Args):
    seats: tuple[str, ...] = tuple(f"learner,{name},{name},{name}" for name in KINDS)


def main(args: Args) -> list[dict]:
    PLAYER_PROBS.update(KINDS)
    return adapt.main(args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
