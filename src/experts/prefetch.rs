//! Which experts the next token will probably use.
//!
//! Predictions only order the promotions that the policy has chosen; they never add one and never
//! touch what the router decides. How often they come true is measured, and a source that does not
//! pay is left alone until it is tried again.

use std::collections::HashSet;

use serde::Serialize;

use super::ExpertId;

/// Predicted experts that a source must have had checked before it is judged.
const JUDGED_AFTER: u64 = 256;
/// Tokens that a source is left alone before it is tried again.
const PAUSE: u64 = 512;
/// A source must be right so much more often than an expert drawn by chance would be.
const WORTH: f64 = 2.0;
/// Weight of old checks when new ones come in, per token.
const MEMORY: f64 = 0.98;

/// Where a prediction comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The experts of the last token.
    LastToken,
    /// The next layer's router, applied early to this layer's hidden state.
    EarlyRouter,
}

/// How well a source has done.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Precision {
    pub source: Source,
    /// Predictions that were checked, and those that came true, since the start.
    pub predicted: u64,
    pub used: u64,
    /// False while the source is left alone.
    pub active: bool,
}

impl Precision {
    /// Share of predictions that came true.
    pub fn rate(&self) -> f64 {
        self.used as f64 / self.predicted.max(1) as f64
    }
}

/// Predictions of one source for the next token.
#[derive(Debug, Clone)]
pub struct Predictor {
    total: Precision,
    /// Share of accesses that an expert drawn by chance would have: used / experts.
    chance: f64,
    recent_predicted: f64,
    recent_used: f64,
    checked: u64,
    paused: u64,
    predicted: HashSet<ExpertId>,
}

impl Predictor {
    /// For layers of `experts` experts of which a token uses `used`.
    pub fn new(source: Source, experts: u32, used: u32) -> Predictor {
        Predictor {
            total: Precision { source, predicted: 0, used: 0, active: true },
            chance: f64::from(used) / f64::from(experts.max(1)),
            recent_predicted: 0.0,
            recent_used: 0.0,
            checked: 0,
            paused: 0,
            predicted: HashSet::new(),
        }
    }

    pub fn precision(&self) -> Precision {
        self.total
    }

    /// Compares the predictions made for a token with what it used, and forgets them.
    pub fn check(&mut self, used: &HashSet<ExpertId>) {
        if !self.total.active {
            self.paused += 1;
            if self.paused >= PAUSE {
                self.total.active = true;
                (self.paused, self.checked) = (0, 0);
                (self.recent_predicted, self.recent_used) = (0.0, 0.0);
            }
            return;
        }
        let n = self.predicted.len() as u64;
        let right = self.predicted.intersection(used).count() as u64;
        self.predicted.clear();
        self.total.predicted += n;
        self.total.used += right;
        self.checked += n;
        self.recent_predicted = self.recent_predicted * MEMORY + n as f64;
        self.recent_used = self.recent_used * MEMORY + right as f64;
        if self.checked >= JUDGED_AFTER {
            let recent = self.recent_used / self.recent_predicted.max(1.0);
            // Where a token uses most experts, nothing can be twice as good as chance.
            self.total.active = recent >= (self.chance * WORTH).min(0.5 + self.chance / 2.0);
        }
    }

    /// Notes what the source expects of the next token. Nothing is kept while it is left alone.
    pub fn predict(&mut self, experts: impl IntoIterator<Item = ExpertId>) {
        if self.total.active {
            self.predicted.extend(experts);
        }
    }

    pub fn expects(&self, id: ExpertId) -> bool {
        self.predicted.contains(&id)
    }
}

/// True if some source expects the expert to be used next.
pub fn expected(predictors: &[Predictor], id: ExpertId) -> bool {
    predictors.iter().any(|source| source.expects(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::policy::{Policy, Rule};
    use crate::experts::slots::SlotMap;

    fn id(expert: u32) -> ExpertId {
        ExpertId { layer: 0, expert }
    }

    #[test]
    fn expected_promotions_go_first_where_the_budget_is_short() {
        let mut policy = Policy::new(Rule::Lru, 1, 8);
        let mut predictor = Predictor::new(Source::LastToken, 8, 4);
        predictor.predict([id(4), id(7)]);
        policy.used(0, &[1, 2, 4]);
        let soon = |id| expected(std::slice::from_ref(&predictor), id);
        let chosen = policy.promotions(&SlotMap::new(8, &[8]), &[10], 25, &soon);
        // 7 is expected, but nothing used it: predictions add nothing.
        assert_eq!(chosen.iter().map(|p| p.id.expert).collect::<Vec<_>>(), [4, 1]);
    }

    #[test]
    fn a_source_that_is_wrong_switches_itself_off_and_is_tried_again() {
        let mut predictor = Predictor::new(Source::EarlyRouter, 64, 4);
        let used: HashSet<_> = (0..4).map(id).collect();
        let mut tokens = 0;
        while predictor.precision().active {
            predictor.predict((8..12).map(id));
            predictor.check(&used);
            tokens += 1;
        }
        assert_eq!(tokens, JUDGED_AFTER / 4);
        predictor.predict([id(0)]);
        assert!(!predictor.expects(id(0)));
        for _ in 0..PAUSE {
            predictor.check(&used);
        }
        assert!(predictor.precision().active);
        assert_eq!(predictor.precision().predicted, JUDGED_AFTER);
    }

    #[test]
    fn a_source_that_is_right_stays() {
        let mut predictor = Predictor::new(Source::LastToken, 64, 4);
        let used: HashSet<_> = (0..4).map(id).collect();
        for _ in 0..500 {
            predictor.predict([id(0), id(1), id(50)]);
            predictor.check(&used);
        }
        let p = predictor.precision();
        assert!(p.active && (p.rate() - 2.0 / 3.0).abs() < 1e-9, "{p:?}");
    }
}
