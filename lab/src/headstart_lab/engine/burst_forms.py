"""The forms of the twins benchmark: requests of a burst, failure of its leader, least tokens to compute."""

from array import array
from dataclasses import dataclass, replace
from random import Random

from headstart.bench.suite import Build
from headstart.core.errors import ConfigError
from headstart.workload.jobs import jobs_from_prompts
from headstart.workload.scenarios import WorkloadPhase, WorkloadScenario
from headstart.workload.synthetic import prompts_with_prefix, random_tokens

BLOCK_SIZE = 16
LOSS_STEP = 3  # the leader is aborted or fails in this step ...
LOSS_CAP = 256  # ... of this many tokens, unless another cap is given: during its prefill


@dataclass(frozen=True, slots=True)
class Form:
    """One burst, sizes in tokens. With a tree each branch shares `branch` more tokens, and each leaf has `own`."""

    requests: int = 32
    prefix: int = 2048
    own: int = 32
    output: int = 16
    cap: int = 0  # long_prefill_token_threshold; 0: none
    tree: tuple[int, int] | None = None  # (branches, leaves of each), instead of `requests`
    branch: int = 256
    same: bool = False  # all prompts are equal, including their own part
    loss: str = ""  # event of the first request during its prefill: "" | "abort" | "poison"

    @property
    def name(self) -> str:
        branches, leaves = self.tree or (0, 0)
        what = f"tree {branches}x{leaves}" if self.tree else "one prompt" if self.same else "burst"
        return " ".join(filter(None, (what, self.loss, f"cap {self.cap}" if self.cap else "")))

    def prompts(self, vocab_size: int, rng: Random) -> "list[array[int]]":
        """Return the prompts; forms that differ only in cap and loss have the same ones."""
        root = random_tokens(self.prefix, vocab_size, rng)
        if self.same:
            return [root + random_tokens(self.own, vocab_size, rng)] * self.requests
        if self.tree is None:
            return prompts_with_prefix(root, self.requests, self.own, vocab_size, rng)
        branches, leaves = self.tree
        stems = prompts_with_prefix(root, branches, self.branch, vocab_size, rng)
        return [prompt for stem in stems for prompt in prompts_with_prefix(stem, leaves, self.own, vocab_size, rng)]

    def ideal_tokens(self, lost: int) -> int:
        """Return the prompt tokens that must be computed if nothing is computed twice.

        A fully cached prompt still computes its last token, and a partial block is never shared. The first request, if
        aborted, needs no tokens of its own; if it fails, the `lost` tokens that it computed are not trusted and are
        computed again.
        """
        if self.same:
            prompt = self.prefix + self.own
            return prompt + (self.requests - 1) * (prompt % BLOCK_SIZE or 1)
        survivors = self.num_requests - bool(self.loss)
        stems = self.tree[0] * self.branch if self.tree else 0
        return self.prefix + stems + survivors * self.own + (lost if self.loss == "poison" else 0)

    @property
    def num_requests(self) -> int:
        return self.tree[0] * self.tree[1] if self.tree else self.requests


def parse_tree(text: str) -> tuple[int, int] | None:
    """Return `4x8` as (4, 8); None for an empty text. Raises ConfigError."""
    if not text:
        return None
    branches, _, leaves = text.partition("x")
    if not (branches.isdecimal() and leaves.isdecimal() and int(branches) and int(leaves)):
        raise ConfigError(f"--tree {text!r} is no tree; write BRANCHESxLEAVES, such as 4x8")
    return int(branches), int(leaves)


def check_form(form: Form) -> Form:
    """Return the form, capped if its leader is aborted or fails in prefill. Raises ConfigError for invalid forms."""
    if form.loss and not form.cap:
        form = replace(form, cap=LOSS_CAP)
    if form.loss and form.cap * LOSS_STEP >= form.prefix:
        raise ConfigError(
            f"the leader ends after {LOSS_STEP} steps of {form.cap} tokens, but the prefix of {form.prefix} tokens "
            f"ends before; lower --long-prefill-token-threshold"
        )
    if form.same and (form.tree or form.loss):
        raise ConfigError("--same excludes --tree, --abort and --poison")
    if form.num_requests < 2:
        raise ConfigError("a burst needs at least two requests")
    for what, tokens in (("prefix", form.prefix), ("cap", form.cap)):
        if tokens % BLOCK_SIZE:
            raise ConfigError(f"a {what} of {tokens} tokens is not a multiple of the block size of {BLOCK_SIZE}")
    return form


def every_form(base: Form) -> list[Form]:
    """Return all forms that are part of the acceptance test."""
    capped = replace(base, cap=LOSS_CAP)
    tree = replace(base, tree=(4, 8))
    return [
        *(base, capped, tree, replace(tree, cap=LOSS_CAP)),
        *(replace(base, same=True), replace(capped, same=True)),
        *(replace(capped, loss="abort"), replace(capped, loss="poison")),
        replace(capped, tree=(4, 8), loss="abort"),
    ]


def twins(form: Form) -> Build:
    """Return the scenario of a burst of any form in which no request is aborted or fails."""

    def build(vocab_size: int, rng: Random) -> WorkloadScenario:
        return WorkloadScenario(
            "twins", (WorkloadPhase("cold", tuple(jobs_from_prompts(form.prompts(vocab_size, rng), form.output))),)
        )

    return build
