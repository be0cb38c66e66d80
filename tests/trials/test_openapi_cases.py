"""schemathesis reads /openapi.json and asks what the document allows and what it forbids: no answer is a 500 or of an untold shape."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import hypothesis
import playground_server
import pytest
import requests
import schemathesis
from fake_model import FakeModel
from hypothesis import HealthCheck, Phase, given
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from trial_server import serving

MAX_TOKENS = 32
"""Longer answers are like these, only longer."""
MIN_CASES = 3


@dataclasses.dataclass
class Tally:
    n_cases: int = 0
    statuses: Counter[int] = dataclasses.field(default_factory=Counter)


def run_cases(address: str, n_cases: int) -> Tally:
    """So many cases at least, half of them wrong on purpose."""
    load_all_checks()
    names = ("status_code", "content_type", "response_schema", "response_headers")
    checks = CHECKS.get_by_names([f"{name}_conformance" for name in names])
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    results = list(schema.get_all_operations())
    found = [one.ok() for one in results if isinstance(one, Ok)]
    assert len(found) == len(results)
    # Those with little to vary come first: what they leave of their share goes to the others.
    operations = sorted(found, key=lambda one: (bool(one.body), bool(one.path_parameters)))
    tally, left = Tally(), 2 * len(operations)
    with requests.Session() as session:
        known = session.post(f"{address}/v1/sessions", json={}).json()["id"]
        for operation in operations:
            for mode in GenerationMode:
                share = max(MIN_CASES, -(-(n_cases - tally.n_cases) // left))
                left -= 1
                strategy = operation.as_strategy(generation_mode=mode)
                _run_operation(strategy, share, session, checks, tally, known)
    return tally


def _run_operation(
    strategy: Any, n_cases: int, session: requests.Session, checks: Sequence[Any], tally: Tally, known: str
) -> None:
    @hypothesis.settings(
        max_examples=n_cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
    )
    @given(case=strategy)
    def one(case: Case) -> None:
        _aim(case, tally.n_cases, known)
        response = case.call(session=session, timeout=60)
        tally.n_cases += 1
        tally.statuses[response.status_code] += 1
        # 504 is the told end of a deadline that the case itself chose.
        assert response.status_code < 500 or response.status_code == 504, (response.text, case.body)
        case.validate_response(response, checks=list(checks))

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong where nothing is taken
        one()


def _aim(case: Case, i: int, known: str) -> None:
    """Answers stay short; and most cases get past the door, where any name of a model or session is a wrong one."""
    if i % 4 and case.path.startswith("/v1/sessions/{id}") and case.method != "DELETE":
        case.path_parameters["id"] = known
    if not isinstance(case.body, dict):
        return
    for field in ("model", "session", "state"):
        if i % 4 and isinstance(case.body.get(field), str):
            del case.body[field]
    for field in ("max_tokens", "max_completion_tokens"):
        requested = case.body.get(field)
        if isinstance(requested, int) and MAX_TOKENS < requested <= 1 << 16:
            case.body[field] = MAX_TOKENS


@pytest.fixture(autouse=True)
def _strangers_warnings() -> Any:
    """Of schemathesis and hypothesis about their own work, not about ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_hundred_cases_of_the_document_get_answers_of_the_document() -> None:
    models = (FakeModel("text", most=4096), FakeModel("pixels", shape=(2, 2, 3), most=4096))
    with playground_server.serving(*models) as address:
        tally = run_cases(address, 100)
    assert tally.n_cases >= 80
    assert tally.statuses[200], "nothing was right: the cases prove little"
    assert tally.statuses[400], "nothing was wrong: the cases prove little"


@pytest.mark.trial
def test_five_thousand_cases_of_the_document_get_answers_of_the_document() -> None:
    with serving() as server:
        tally = run_cases(server.address, 5000)
        assert server.process.poll() is None
    print(tally)
    assert tally.n_cases >= 5000
    assert tally.statuses[200] > 500
    assert tally.statuses[400] > 500
