"""The whole network foreseen: residuals that move straight to zero. Residuals, their Jacobian, the system, the step."""
