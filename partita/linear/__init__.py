"""Linear models with scikit-learn's interface and objectives, and a duality gap that says how close each fit is.

Source of the methods: see the modules `dual`, `newton`, `coordinate` and `softmax`.
"""

from partita.linear.elastic_net import ElasticNet
from partita.linear.lasso import Lasso
from partita.linear.logistic import LogisticRegression
from partita.linear.poisson import PoissonRegressor
from partita.linear.ridge import Ridge
from partita.linear.svm import LinearSVC, LinearSVR
from partita.linear.svmlight import read_svmlight

__all__ = ["ElasticNet", "Lasso", "LinearSVC", "LinearSVR", "LogisticRegression", "PoissonRegressor", "Ridge", "read_svmlight"]
