# SPDX-License-Identifier: Apache-2.0
"""Entry point of the embedded node service, which connectors start."""

import sys

from kvhaven.ending import ended_at_once
from kvhaven.service.main import embedded_main

with ended_at_once():
    sys.exit(embedded_main())
