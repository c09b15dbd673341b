"""The exact Bayes posterior over who of a population sits where. In each step:

    probs = seats.action_probs(state)
    expected = posterior.action_probs(probs)  # the best prediction of the next action
    posterior.update(actions, present_before, done)
    seats.update(done)

where `posterior = Posterior(seats)`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import LEARNER, Seats

import torch
from torch import Tensor


class Posterior:
    """Beside a Seats. `remember`: what is known outlasts a game. `unsteady`: share of the games whose
    mixed seats are taken to be redrawn after each game; which ones is inferred. `log_joint`: over
    who it is [P] and, if some are unsteady, whether it is [2]: [B, N, 1 or 2, P]."""

    def __init__(self, seats: Seats, remember=False, unsteady=0.0):
        self.seats = seats
        count = len(seats.population)
        device = seats.kinds.device
        shares = [1.0]
        if unsteady > 0:
            unsteady = min(unsteady, 1 - 1e-6)
            shares = [1 - unsteady, unsteady]
        shares = torch.tensor(shares, device=device)[:, None]
        log_prior = (shares / count).log().expand(-1, count)  # [1 or 2, P]
        self.log_joint = log_prior.expand(*seats.kinds.shape, -1, -1).clone()
        # After a game who it is becomes (1 - forget) * posterior + forget * prior.
        steady = seats.steady_prob
        forget = torch.stack([steady, torch.ones_like(steady)], 2)[..., : len(shares), None]
        if not remember:
            forget = torch.ones_like(forget)
        self._log_keep = (1 - forget).log()
        self._log_forget = (forget / count).log()

    def probs(self) -> Tensor:
        """[B, N, P] which player of the population it is; of a learner the prior"""
        return self.log_joint.logsumexp(2).exp()

    def action_probs(self, probs: Tensor) -> Tensor:
        """[B, N, 7] the best prediction of the next action; of a learner its own probabilities, in
        `probs`, what the last `seats.action_probs` gave"""
        seats = self.seats
        if not seats.has_rule_based:
            return probs
        of_population = seats.table[:, :, : len(seats.population)]
        expected = (self.probs()[..., None] * of_population).sum(2)
        return torch.where((seats.kinds == LEARNER)[..., None], probs, expected)

    def update(self, actions: Tensor, present_before: Tensor, done: Tensor) -> None:
        """Bayes' rule with the last `seats.action_probs`; before `seats.update`"""
        seats = self.seats
        if not seats.has_rule_based:
            return
        count = len(seats.population)
        action = actions.long()[..., None, None].expand(-1, -1, count, 1)
        likelihood = seats.table[:, :, :count].gather(3, action).squeeze(3)
        likelihood = likelihood.clamp(min=1e-9)  # a stranger does anything
        acted = present_before & (seats.kinds != LEARNER)
        evidence = likelihood.log() * acted[..., None]
        log_joint = self.log_joint + evidence[:, :, None]
        log_joint = log_joint.flatten(2).log_softmax(2).view(log_joint.shape)
        log_mass = log_joint.logsumexp(3, keepdim=True)
        next_game = torch.logaddexp(log_joint + self._log_keep, log_mass + self._log_forget)
        ended = done[:, None]
        self.log_joint.copy_(torch.where(ended[..., None, None], next_game, log_joint))
