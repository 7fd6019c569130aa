"""From the operator's configuration to what each part is told: one function a part, so that no part reads the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollmesh_learner.audit.margin_book import MarginBook, Remembered
from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.members.standing import StandingRules
from rollmesh_learner.members.welcome import AdmissionTerms
from rollmesh_learner.run_keys import RunKeys
from rollmesh_learner.steps import StepPlan
from rollmesh_learner.training.tripwires import POOLED, Bounds
from rollmesh_learner.watch import WatchRules
from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.intake import IntakeTerms
from rollmesh_learner.work.leasing import LeaseTerms
from rollmesh_protocol.lease import SwapMode
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from rollmesh_protocol.verdicts.logprobs import LogprobLimits
from rollmesh_protocol.verdicts.margins import Thresholds


def book_rules(config: LearnerConfig) -> Rules:
    """What the book of work goes by."""
    return config.rollouts.to(Rules, steps=config.run.steps)


def step_plan(config: LearnerConfig) -> StepPlan:
    """When to publish, to save and to stop."""
    return StepPlan(
        steps=config.run.steps,
        publish_every=config.rollouts.publish_every,
        checkpoint_every=config.training.checkpoint_every,
    )


def watch_rules(config: LearnerConfig) -> WatchRules:
    """How the steps are watched."""
    wires = config.tripwires
    return wires.to(WatchRules, bounds=wires.to(Bounds), checkpoint_every=config.training.checkpoint_every)


def rollback_reach(config: LearnerConfig) -> int:
    """How many steps older than the newest a checkpoint must be that is kept to go back to.

    The rewards of the last few steps, of rollouts up to S steps old, may tell that the weights of the oldest were bad
    already, so that the step before that is the newest one above suspicion.
    """
    return config.rollouts.staleness + POOLED if config.tripwires.enabled else 0


def lease_terms(config: LearnerConfig, *, card: RunCard, keys: RunKeys) -> LeaseTerms:
    """What every lease says."""
    return LeaseTerms(
        run=card.run,
        seed_key=keys.seed_key,
        max_new_tokens=config.rollouts.max_new_tokens,
        most_groups=config.leases.groups_at_most,
        least_duration_s=config.leases.min_duration_s,
        most_duration_s=config.leases.max_duration_s,
        swap_mode=swap_mode(config),
    )


def swap_mode(config: LearnerConfig) -> SwapMode:
    """What leases say of swaps: ``recompute`` where that is allowed and pays, or where nothing else is allowed."""
    modes = config.leases.swap_modes
    is_long = config.rollouts.max_new_tokens >= config.leases.recompute_from
    return "recompute" if "recompute" in modes and (is_long or "drain" not in modes) else "drain"


def intake_terms(config: LearnerConfig, *, card: RunCard, keys: RunKeys) -> IntakeTerms:
    """What results are checked against."""
    return IntakeTerms(
        run=card.run,
        seed_key=keys.seed_key,
        vocabulary=card.vocabulary,
        stop_tokens=frozenset(card.stop_tokens),
        max_new_tokens=config.rollouts.max_new_tokens,
    )


def admission_terms(config: LearnerConfig) -> AdmissionTerms:
    """Who may join."""
    return config.admission.to(AdmissionTerms)


def audit_queue(config: LearnerConfig) -> int:
    """How many rollouts may wait for audit before nodes that are audited much get less work."""
    rollouts = config.rollouts
    return int(config.audit.queue * rollouts.groups_per_step * rollouts.samples_per_group)


def standing_rules(config: LearnerConfig) -> StandingRules:
    """How much of a node's work is audited; nothing where audits are switched off."""
    rules = config.audit.to(StandingRules)
    if config.audit.enabled:
        return rules
    return replace(rules, rate_new=0.0, rate_probation=0.0, rate_steady=0.0)


def thresholds(config: LearnerConfig) -> Thresholds:
    """Where honest noise ends."""
    return config.audit.to(Thresholds)


def logprob_limits(config: LearnerConfig) -> LogprobLimits:
    """From where on claimed log-probabilities are not believed."""
    return config.trust.to(LogprobLimits)


def judging(config: LearnerConfig, *, drift: DriftTest | None) -> Judging:
    """How this run judges sampling, for its card: what the auditor and the trainer are given."""
    return Judging(thresholds=thresholds(config), drift=drift, logprobs=logprob_limits(config))


def margin_book(
    config: LearnerConfig, *, drift: DriftTest | None, known: Mapping[str, Remembered]
) -> MarginBook | None:
    """What is remembered of nodes' margins; None for a run that was not calibrated."""
    if drift is None:
        return None
    return MarginBook(drift, thresholds=thresholds(config), longest=config.rollouts.max_new_tokens, known=known)
