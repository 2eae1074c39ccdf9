"""Controls for studies: teachers that cannot teach what a run is said to learn from them.

OPSDTrainer(..., methods=[Shuffled()])

Evaluations compare with the real teacher.
"""

from dataclasses import dataclass, replace

from accelerate.utils import gather_object

from trl_opsd import Method
from trl_opsd.losses import Divergence
from trl_opsd.methods.selection import TokenSelection


class Shuffled(Method):
    """The teacher of each row reads what the columns give for another prompt of the step, of all processes."""

    def before(self, rows):
        number = self.host.args.num_generations
        everyone = gather_object([(repr(row["prompt"]), row.request.of_teacher) for row in rows])
        for row in rows:
            own = everyone[row.place][0]
            # The completions of a prompt are adjacent; the same prompt may come twice.
            others = [everyone[(row.place + away) % len(everyone)] for away in range(number, len(everyone), number)]
            row.notes["other"] = next((prompt for asked, prompt in others if asked != own), None)
            if row.notes["other"] is None:
                raise ValueError("`Shuffled` needs two different prompts in a step: raise the batch size.")

    def teacher_prompt(self, row, completion_text, prompt):
        return row.notes["other"] if self.host.model.training else prompt


class Unprivileged(Method):
    """The teacher reads the student's prompt."""

    def teacher_prompt(self, row, completion_text, prompt):
        return row.request.student if self.host.model.training else prompt


@dataclass
class Constant(Method):
    """Nothing is learned from the teacher: the least likely fifth of the tokens is pushed down (arXiv 2608.31046).

    The last of several methods, as it thins what others weigh.
    """

    advantage: float = -0.5
    adds_nll = by_token = True

    def __post_init__(self):
        self.least = TokenSelection("student_surprise", 0.2)

    def before(self, rows):
        for row in rows:
            row.nll_weight += self.advantage

    def token_weights(self, weights, rollout, rows, targets):
        # The denominator of the step is known before the logits that rank the tokens.
        return self.least.thinned(weights)

    def objective(self, objective):
        return replace(objective, divergence=Nothing(), selection=self.least) if self.host.model.training else objective


class Nothing(Divergence):
    """0, with a gradient of 0."""

    def value(self, log_student_RV, log_teacher_RV):
        return 0.0 * log_student_RV.sum(-1)
