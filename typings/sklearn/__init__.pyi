# The part of scikit-learn that Stagemesh uses.
