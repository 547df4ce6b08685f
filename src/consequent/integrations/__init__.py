"""Glue for the trainers people use. Each module imports its package, and nothing imports the modules but their users.

========================================  ==========================================================================
:mod:`consequent.integrations.lightning`     a callback for Lightning's ``Trainer``
:mod:`consequent.integrations.transformers`  a callback for Hugging Face's ``Trainer``
:mod:`consequent.integrations.sklearn`       estimators for scikit-learn
========================================  ==========================================================================

Accelerate needs none: ``consequent.attach`` before or after ``accelerator.prepare``. Nor do those who make their own
optimiser: ``CSGD`` and its kin are torch optimisers, for ``configure_optimizers`` and ``Trainer(optimizers=…)``.
"""
