# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests, which clients can give any value."""

import pytest

from kvhaven.engine.request_parameters import RequestParameters
from kvhaven.engine.requests import NO_TRANSFER, Permissions


@pytest.mark.parametrize("given", [None, "nonsense", ["kvhaven.tags"], 7])
def test_parameters_of_any_type_are_read(given: object) -> None:
    parameters = RequestParameters(given)
    assert parameters.permissions(load=True, save=False) == Permissions(load=True, save=False)
    assert parameters.transfer == NO_TRANSFER
    assert parameters.handover("request", "service") is None
