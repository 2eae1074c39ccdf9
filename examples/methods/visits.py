"""Weighs or skips a prompt by what its last visit showed, before anything is generated for it (GRESO, 2506.02177).

OPSDTrainer(..., methods=[SkipFlatGroups()])   # whose completions all had the same reward
OPSDTrainer(..., methods=[SkipNear(0.01)])     # whose divergence was below 0.01 nats per token
"""

from dataclasses import asdict, dataclass, replace
from hashlib import sha256

from accelerate.utils import gather_object
from groups import by_place

from trl_opsd import Method


@dataclass(frozen=True)
class Visit:
    """What is known of a prompt since it was last generated for."""

    gap: float | None
    """Mean divergence over its tokens, in nats; `None` where none counted."""
    rewards: tuple[float | None, ...]
    """Of each completion; empty without reward functions."""
    tokens: int
    """Tokens that were generated for all of its completions."""
    skipped: int = 0
    """How often it was skipped since."""


class Visits(Method):
    """Remembers the last visit of each prompt, the same in all processes; a resumed training goes on with them.

    Subclasses override `weight`. Rows that are alike are one prompt.
    """

    name = "visits"
    skips = True

    def weight(self, row, last):
        """Of the tokens of a prompt in the loss, by its last visit, `None` at first; at 0 it is skipped."""
        return 1.0

    def begin(self):
        self.last, self.saved = {}, 0

    def before(self, rows):
        # The completions of a prompt are adjacent and may be in several processes: the one with the first decides.
        number = self.host.args.num_generations
        firsts = [row for row in rows if row.place % number == 0]
        keys = [sha256(repr(dict(row)).encode()).hexdigest()[:16] for row in firsts]
        weights = [float(self.weight(row, self.last.get(key))) for row, key in zip(firsts, keys, strict=True)]
        prompts = gather_object(list(zip(keys, weights, strict=True)))
        self.keys = [key for key, _ in prompts]
        for row in rows:
            row.prompt_weight *= prompts[row.place // number][1]

    def generated(self, batch):
        if not batch.is_training:
            return
        groups = batch.counts["asked"].view(len(self.keys), -1), batch.counts["generated"].view(len(self.keys), -1)
        self.asked, self.tokens = (groups[0] > 0).any(1).tolist(), groups[1].sum(1).tolist()
        self.rewards = batch.rewards
        for key in (key for key, asked in zip(self.keys, self.asked, strict=True) if not asked and key in self.last):
            self.saved += self.last[key].tokens
            self.last[key] = replace(self.last[key], skipped=self.last[key].skipped + 1)
        self.host.record("prompts/skipped", 1 - sum(self.asked) / len(self.asked))
        self.host.record("prompts/tokens_saved_total", self.saved)

    def tally(self, part):
        return by_place(part, self.host, ("weight", "divergence"))

    def stepped(self, sums, tally):
        number = self.host.args.num_generations
        for place, key in enumerate(self.keys):
            rows = slice(place * number, (place + 1) * number)
            total, divergence = tally[rows].sum(0).tolist()
            if self.asked[place]:
                gap = divergence / total if total else None
                self.last[key] = Visit(gap, tuple(self.rewards[rows]), self.tokens[place])

    def state(self):
        return {"saved": self.saved, "last": {key: asdict(one) for key, one in self.last.items()}}

    def restore(self, state):
        self.saved = state["saved"]
        self.last = {key: Visit(**{**one, "rewards": tuple(one["rewards"])}) for key, one in state["last"].items()}


class SkipFlatGroups(Visits):
    """Skips a prompt once after a visit in which all of its completions had the same reward."""

    needs_rewards = True

    def weight(self, row, last):
        known = [] if last is None or last.skipped else [one for one in last.rewards if one is not None]
        return float(not (len(known) > 1 and len(set(known)) == 1))


@dataclass
class SkipNear(Visits):
    """Skips a prompt once after a visit with a divergence below `gap`, in nats per token."""

    gap: float = 0.01

    def weight(self, row, last):
        return float(last is None or bool(last.skipped) or last.gap is None or abs(last.gap) >= self.gap)
