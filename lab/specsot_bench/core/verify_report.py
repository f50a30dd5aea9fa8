"""The report of `specsot verify`: acceptance of the head, differing tokens, as text and as JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from specsot.members import Overrides

# Rotary bases with which published heads were trained.
USUAL_ROPE_THETAS = (10000.0, 500000.0, 1000000.0)
# Fraction of steps that accept a draft. Heads that are connected wrongly stay below it, others do not.
MIN_ACCEPTANCE = 0.2
# Nats per token. Another setting must explain the base's text better by so much. Untuned.
MIN_GAIN = 0.02
# Standard errors. That difference must exceed so many; about one false alarm in 30,000.
GAIN_ERRORS = 4.0
# Factor. Another setting must raise the tokens per step by so much. Untuned.
MIN_SPEEDUP = 1.03


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts were accepted.

    lengths: Number of accepted drafts of every step; empty if no step was measured.
    """

    lengths: tuple[int, ...]

    @property
    def per_step(self) -> float:
        """Return the mean number of tokens of a step, bonus included (tau); 1.0 without steps."""
        return 1 + statistics.fmean(self.lengths) if self.lengths else 1.0

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Return the fractions of steps that accept at least 1, 2, ... drafts: lengths (0, 2, 1, 0) -> (0.5,
        0.25). Empty if no draft was accepted.
        """
        steps = max(len(self.lengths), 1)
        deepest = max(self.lengths, default=0)
        return tuple(sum(n >= depth for n in self.lengths) / steps for depth in range(1, deepest + 1))

    @property
    def any(self) -> float:
        """Return the fraction of steps that accept a draft; 0 without steps."""
        return self.by_depth[0] if self.by_depth else 0.0


@dataclass(frozen=True, slots=True)
class HeadFit:
    """How well a head fits its base.

    as_is: Acceptance under the head's own settings.
    trial: Other settings that explain the base's text better; None: no settings do.
    better: Acceptance under `trial`; None without a trial.
    about: The head's family, and what of this package works with it, line by line.
    """

    as_is: Acceptance
    trial: Overrides | None = None
    better: Acceptance | None = None
    about: tuple[str, ...] = ()

    @property
    def verdict(self) -> Literal["fits", "off", "unfit"]:
        """Return "off" if one setting is wrong, and `trial` says which; else "fits", or "unfit" if hardly a
        draft is accepted.

        "off" requires that the other setting raises the tokens per step by the factor MIN_SPEEDUP. "fits"
        requires that at least the fraction MIN_ACCEPTANCE of the steps accepts a draft.
        """
        if self.better is not None and self.better.per_step >= MIN_SPEEDUP * self.as_is.per_step:
            return "off"
        return "fits" if self.as_is.any >= MIN_ACCEPTANCE else "unfit"


def settings_to_try(
    given_settings: Overrides, taps: tuple[int, ...] | None, layers: int, base_theta: float
) -> tuple[Overrides, ...]:
    """Return settings worth trying: every tap one layer off, and other bases of the head's rotary positions.

    The layers are tried one lower and one higher each, and left out where a layer would be below 0 or above
    `layers`; without taps none are tried. The rotary bases tried are `base_theta` and USUAL_ROPE_THETAS,
    each once, even if the head uses that base already.

    given_settings: Settings that are given already; they stay, apart from the one that is tried.
    taps: Layers that the head reads; None for a head that reads only the last hidden state.
    layers: Number of layers of the base.
    base_theta: Rotary base of the base model.
    """
    shifted_taps = [tuple(tap + step for tap in taps) for step in (-1, 1)] if taps else []
    layer_trials = [
        replace(given_settings, aux_layers=shifted)
        for shifted in shifted_taps
        if shifted[0] >= 0 and shifted[-1] <= layers
    ]
    thetas = dict.fromkeys((USUAL_ROPE_THETAS[0], base_theta, *USUAL_ROPE_THETAS[1:]))
    return (*layer_trials, *(replace(given_settings, rope_theta=theta) for theta in thetas))


def as_flags(settings: Overrides) -> str:
    """Return settings as command-line flags; an empty text if nothing is set.

    Layers come first: "--aux-layers 2,14,26 --drafter-rope-theta 10000".

    settings: Settings that replace those of the head's config.
    """
    layers = settings.aux_layers
    theta = settings.rope_theta
    flags = [] if layers is None else [f"--aux-layers {','.join(map(str, layers))}"]
    return " ".join([*flags, *([] if theta is None else [f"--drafter-rope-theta {theta:.10g}"])])


def choose_trial(
    own_log_probs: Sequence[float], log_probs_of_trials: Mapping[Overrides, Sequence[float]]
) -> Overrides | None:
    """Return the settings that explain the same text best, if they do so beyond doubt; else None.

    Best means the largest mean gain per token. None is also returned without trials.

    own_log_probs: Log-probability that the head gives each token of the base's text, under its own settings.
    log_probs_of_trials: Log-probabilities of the same tokens under other settings, by these settings.
    """
    gains = {
        trial: [b - a for a, b in zip(own_log_probs, log_probs)]
        for trial, log_probs in log_probs_of_trials.items()
    }
    certain = {trial: statistics.fmean(gain) for trial, gain in gains.items() if _is_sure(gain)}
    return max(certain, key=lambda trial: certain[trial], default=None)


def _is_sure(gains: Sequence[float]) -> bool:
    """Return whether the mean gain is large enough, and large compared with its standard error; False for
    fewer than two tokens.

    The mean must exceed MIN_GAIN nats, and GAIN_ERRORS times the standard error of the mean.

    gains: Gain of each token under the other settings, in nats.
    """
    if len(gains) < 2:
        return False
    mean = statistics.fmean(gains)
    error = statistics.stdev(gains) / len(gains) ** 0.5
    return mean > MIN_GAIN and mean > GAIN_ERRORS * error


# Share of tokens that may be near ties which rounding decided differently. Untuned.
MAX_TIE_SHARE = 0.01

# Returns a token id's text.
Spell = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """A token that differs from the reference.

    at: Index of the token in the answer.
    ours: The fleet's token; None: the answer ended there.
    theirs: The reference's token.
    gap: Difference of the reference's two largest logits; if it is tiny, rounding decides.
    """

    at: int
    ours: int | None
    theirs: int
    gap: float


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One answer, compared with the reference.

    question: The question.
    tokens: Number of tokens of the answer.
    per_step: Mean number of tokens of the fleet's steps; 1.0 without drafts.
    differences: Tokens that differ from the reference; empty if none do.
    """

    question: str
    tokens: int
    per_step: float
    differences: tuple[TokenDifference, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What `specsot verify` found.

    answers: The compared answers.
    near: Gap below which a difference is a matter of rounding.
    drafter: The drafter that the fleet was asked to use.
    fit: Fit of the head to the base; None: no head was examined.
    rounding: The precision of the base, if the base itself was the reference; empty: Transformers was.
    about: Family, sizes and features of the base, in one line.
    model: Path or Hub name of the base.
    draft_model: Path or Hub name of the head or model that drafts; empty if none was loaded.
    """

    answers: tuple[CheckedAnswer, ...]
    near: float
    drafter: str
    fit: HeadFit | None = None
    rounding: str = ""
    about: str = ""
    model: str = ""
    draft_model: str = ""

    @property
    def reference(self) -> str:
        """Return the name of the reference: "Transformers", or the base itself if its rounding makes a
        different model of it.
        """
        return f"the base in {self.rounding} by itself" if self.rounding else "Transformers"

    def first(self, answer: CheckedAnswer) -> TokenDifference | None:
        """Return an answer's first difference that rounding does not explain; None if there is none.

        answer: An answer of this report.
        """
        return next((difference for difference in answer.differences if difference.gap >= self.near), None)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def ties(self) -> int:
        """Return the number of differences that rounding explains, over all answers."""
        return sum(difference.gap < self.near for answer in self.answers for difference in answer.differences)

    @property
    def identical(self) -> bool:
        """Return whether all differences are near ties, and at most MAX_TIE_SHARE of the tokens, or a single
        token.
        """
        all_explained = not any(self.first(answer) for answer in self.answers)
        return all_explained and self.ties <= max(1, MAX_TIE_SHARE * self.tokens)

    @property
    def idle(self) -> bool:
        """Return whether a drafter was asked for and no draft was accepted: drafting may be paused, or the
        drafter missing.
        """
        return self.drafter != "none" and all(answer.per_step <= 1 for answer in self.answers)

    @property
    def holds(self) -> bool:
        """Return whether the answers are identical and the head, if any, fits."""
        return self.identical and (self.fit is None or self.fit.verdict == "fits")


def lines_of(report: Report, spell: Spell) -> Iterator[str]:
    """Yield the report as lines, the first of which names the base, and the second one what drafts.

    An answer counts as the same if rounding explains all its differences. Further lines say that there are
    too many near ties, that no draft was accepted although a drafter was asked for, what the base is, and
    how the head fits; each is left out where it does not apply.

    report: Result of the verification.
    spell: Returns a token id's text.
    """
    if report.model:
        yield f"model     {report.model}"
    if report.draft_model:
        yield f"drafts    {report.draft_model}"
    for answer in report.answers:
        first = report.first(answer)
        state = "same" if first is None else "DIFFERS"
        yield f"{state:<8}{answer.tokens:>4} tokens  {answer.per_step:.2f} a step  {answer.question[:60]}"
        if first is not None:
            yield f"        {_difference_in_words(first, report.reference, spell)}"
    same = sum(report.first(answer) is None for answer in report.answers)
    yield (
        f"{same} of {len(report.answers)} answers are what {report.reference} writes, token for token "
        f"({report.tokens} tokens, {report.ties} near ties fell the other way)"
    )
    if same == len(report.answers) and not report.identical:
        yield f"FAIL: too many near ties; at most {MAX_TIE_SHARE:.0%} of the tokens may be"
    if report.idle:
        yield f"note: no draft of {report.drafter} was accepted, so only the split into stages was tested"
    if report.about:
        yield f"base      {report.about}"
    if report.fit is not None:
        yield from _lines_of_fit(report.fit)


def _difference_in_words(difference: TokenDifference, reference: str, spell: Spell) -> str:
    """Return a difference in words: which token was written, and which the reference would write.

    difference: The difference.
    reference: Name of the reference.
    spell: Returns a token id's text.
    """
    ours = "ended" if difference.ours is None else f"wrote {difference.ours} {spell(difference.ours)!r}"
    theirs = f"{reference} {difference.theirs} {spell(difference.theirs)!r}"
    return f"at token {difference.at}: {ours}, {theirs}; its two best logits are {difference.gap:.1e} apart"


def _lines_of_fit(fit: HeadFit) -> Iterator[str]:
    """Yield the lines about the head: its family, its acceptance, and whether it fits.

    If another setting is better, its acceptance and its flags are named.

    fit: Fit of the head to the base.
    """
    for number, line in enumerate(fit.about):
        yield f"{'' if number else 'head':<10}{line}"
    yield f"accepted  {_acceptance_in_words(fit.as_is)}"
    if fit.verdict == "off" and fit.trial is not None and fit.better is not None:
        yield f"          {_acceptance_in_words(fit.better)} with {as_flags(fit.trial)}"
        yield f"the head is OFF by one setting: run it with {as_flags(fit.trial)}"
    elif fit.verdict == "unfit":
        yield "the head does NOT FIT this base: hardly a draft is accepted, and no other layers or theta help"
    else:
        yield "the head fits"


def _acceptance_in_words(accepted: Acceptance) -> str:
    """Return the tokens of a step, and the fraction of steps that accept at least so many drafts.

    If no draft was accepted, the text ends in "one draft: none".

    accepted: The acceptance.
    """
    shares = ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(accepted.by_depth, start=1))
    return f"{accepted.per_step:.2f} tokens a step; steps that accept at least {shares or 'one draft: none'}"


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as an object for JSON.

    "head" is None if no head was examined, and "draft_model" is None if none was loaded.

    "near" is the gap below which a difference counts as a tie.

    report: Result of the verification.
    """
    fit = report.fit
    return {
        "model": report.model,
        "draft_model": report.draft_model or None,
        "holds": report.holds,
        "identical": report.identical,
        "tokens": report.tokens,
        "base": report.about,
        "reference": report.reference,
        "near": report.near,
        "near_ties": report.ties,
        "drafter": report.drafter,
        "idle": report.idle,
        "answers": [asdict(answer) for answer in report.answers],
        "head": None if fit is None else _fit_as_json(fit),
    }


def _fit_as_json(fit: HeadFit) -> dict[str, Any]:
    """Return the head's part of the report; "better" is None if no other setting was better.

    "verdict" is "fits", "off" or "unfit". "better" has the other settings and their acceptance, also if the
    gain is too small for the verdict "off".

    fit: Fit of the head to the base.
    """
    better = None
    if fit.trial is not None and fit.better is not None:
        better = {**asdict(fit.trial), **_accepted_as_json(fit.better)}
    return {"verdict": fit.verdict, "about": fit.about, **_accepted_as_json(fit.as_is), "better": better}


def _accepted_as_json(accepted: Acceptance) -> dict[str, Any]:
    """Return an acceptance as an object for JSON: number of steps, tokens per step, fractions by depth.

    accepted: The acceptance.
    """
    return {
        "steps": len(accepted.lengths),
        "tokens_per_step": round(accepted.per_step, 4),
        "accepted_by_depth": [round(share, 4) for share in accepted.by_depth],
    }
