# SPDX-License-Identifier: Apache-2.0
"""Entry point of the embedded node service, which connectors start."""

import sys

from kvhaven.service.main import embedded_main

sys.exit(embedded_main())
