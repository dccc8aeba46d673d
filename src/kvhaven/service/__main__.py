# SPDX-License-Identifier: Apache-2.0
"""The embedded node service; connectors start it."""

import sys

from kvhaven.service.main import embedded_main

sys.exit(embedded_main())
