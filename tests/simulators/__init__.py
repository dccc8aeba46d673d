# SPDX-License-Identifier: Apache-2.0
"""Simulated accelerators, stricter than real ones: real device types of torch on a CPU."""

from tests.simulators.native import Synchronization
from tests.simulators.simulation import POISON, Simulation, simulated

__all__ = ["POISON", "Simulation", "Synchronization", "simulated"]
