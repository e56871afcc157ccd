"""How hypothesis draws examples: the same in each run, on machines that others use, too."""

from hypothesis import HealthCheck, settings

SEEDED = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
