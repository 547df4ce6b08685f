"""scikit-learn: a multi-layer perceptron trained with C-SGD, in a pipeline and a grid search like any estimator."""

import warnings

from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from consequent.integrations.sklearn import ConsequentialMLPClassifier

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, stratify=y, random_state=0)

warnings.simplefilter("ignore", ConvergenceWarning)  # five epochs are meant to be few
model = make_pipeline(MinMaxScaler(), ConsequentialMLPClassifier((100,), max_iter=5, random_state=0))
search = GridSearchCV(model, {"consequentialmlpclassifier__learning_rate_init": [0.03, 0.1, 0.3]}, cv=2)
search.fit(X_train, y_train)

print("best learning rate:", *search.best_params_.values())
print(f"test accuracy after five epochs: {search.score(X_test, y_test):.1%}")
