"""Which pivots are rounding errors: the constants of all engines and kernels, in one place.

A pivot is what elimination leaves of a diagonal entry. All numbers are in units of float32's (or the matrix's) eps.
"""

# A pivot this many roundings above zero, in units of the largest entry, has about three correct digits. Where the rows
# are still there, a factorisation with smaller ones is made anew in float64.
FEW_DIGITS = 1e3

# In units of its own entry: below it, a pivot may be a fraction of the true one, and would make the step too long.
LEAST_PIVOT = 128

# Times the number of features, and of the diagonal: how large the errors become where all features are nearly alike. A
# matrix whose pivots are rounding errors gets so much more damping.
MORE_DAMPING = 2

# The same in the kernel that factorises moments, where a single pivot can be raised: on activations of transformers and
# on dependent features of many kinds, with a lower one steps overshoot by more than a factor of two; a higher one costs
# digits where there still are some. (256 eps.)
PIVOT_FLOOR = 2.0**-15

# What is so far below zero, as a fraction of its entry, no rounding explains.
LOST_PIVOT = 2.0**-3

# The same in the kernel for a few rows, where little elimination has gone before.
ELIMINATION = 4
