"""Grammar compiles of these tests have no wall-clock limit."""

from patient_compiles import patience, patient_pool

__all__ = ["patience", "patient_pool"]
