"""Parameters and gradients to moved parameters, measured in score space; schedules."""
