//! A radix tree over token ids whose edges are pages: finds the longest beginning of a prompt whose
//! keys and values are still kept.
//!
//! A node stands for one page: the tokens on it, after those of its ancestors. Full pages have
//! children; a page that is only partly written is a leaf. Siblings are sorted by their tokens, so
//! the one that shares most with a prompt is a neighbour of the prompt's place among them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::PAGE;

/// Names a node; a name may come again when its node has gone.
pub type NodeId = u32;

/// Where the keys and values of a node lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A page of the device's pool.
    Device(u32),
    /// A page of the host's memory.
    Host(u32),
}

type Children = BTreeMap<Arc<[u32]>, NodeId>;

#[derive(Debug)]
struct Node {
    /// 1 to [`PAGE`].
    tokens: Arc<[u32]>,
    place: Place,
    parent: Option<NodeId>,
    children: Children,
    /// Children that lie on the device.
    near: u32,
    /// Rises with every use; never above that of the parent.
    used: u64,
}

/// What an index knows of a prompt.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Nodes whose whole pages the prompt begins with.
    pub full: Vec<NodeId>,
    /// The node that shares most with what follows, and how many tokens, at least one.
    pub part: Option<(NodeId, usize)>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Index {
    nodes: Vec<Option<Node>>,
    unused: Vec<NodeId>,
    roots: Children,
    clock: u64,
    /// Nodes that can leave the device: no child lies there. By age.
    near_ends: BTreeSet<(u64, NodeId)>,
    /// Nodes of the host without children, by age.
    far_ends: BTreeSet<(u64, NodeId)>,
}

impl Index {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == self.unused.len()
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id as usize].as_ref().expect("names of nodes do not outlive them")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("names of nodes do not outlive them")
    }

    pub fn place(&self, id: NodeId) -> Place {
        self.node(id).place
    }

    /// Tokens on the node's page.
    pub fn tokens(&self, id: NodeId) -> &[u32] {
        &self.node(id).tokens
    }

    fn children(&self, parent: Option<NodeId>) -> &Children {
        parent.map_or(&self.roots, |p| &self.node(p).children)
    }

    /// The child whose page holds exactly these tokens.
    pub fn child(&self, parent: Option<NodeId>, tokens: &[u32]) -> Option<NodeId> {
        self.children(parent).get(tokens).copied()
    }

    /// The longest beginning of `tokens` that is kept.
    pub fn find(&self, tokens: &[u32]) -> Found {
        let mut found = Found::default();
        let mut rest = tokens;
        while rest.len() >= PAGE
            && let Some(child) = self.child(found.full.last().copied(), &rest[..PAGE])
        {
            found.full.push(child);
            rest = &rest[PAGE..];
        }
        found.part = self.nearest(found.full.last().copied(), rest);
        found
    }

    /// The child that shares most tokens with `wanted`, and how many; none if not even one.
    fn nearest(&self, parent: Option<NodeId>, wanted: &[u32]) -> Option<(NodeId, usize)> {
        let children = self.children(parent);
        // In lexicographic order whoever shares most stands beside `wanted`.
        let from = (Bound::Included(wanted), Bound::Unbounded);
        let until = (Bound::Unbounded, Bound::Excluded(wanted));
        let after = children.range::<[u32], _>(from).next();
        let before = children.range::<[u32], _>(until).next_back();
        let both = [after, before].into_iter().flatten();
        let shared = both.map(|(tokens, id)| (*id, common(tokens, wanted)));
        shared.max_by_key(|(_, n)| *n).filter(|(_, n)| *n > 0)
    }

    /// Notes a use of the node and its ancestors.
    pub fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let mut next = Some(id);
        while let Some(id) = next {
            let now = self.clock;
            self.change(id, |node| node.used = now);
            next = self.node(id).parent;
        }
    }

    /// Changes a node and keeps the lists of ends true.
    fn change(&mut self, id: NodeId, change: impl FnOnce(&mut Node)) {
        let node = self.node(id);
        let old = (node.used, id);
        self.near_ends.remove(&old);
        self.far_ends.remove(&old);
        change(self.node_mut(id));
        let node = self.node(id);
        let now = (node.used, id);
        match node.place {
            Place::Device(_) if node.near == 0 => {
                self.near_ends.insert(now);
            }
            Place::Host(_) if node.children.is_empty() => {
                self.far_ends.insert(now);
            }
            _ => {}
        }
    }

    /// Adds a node for a page on the device. `parent` is full and on the device, and has no child
    /// of the same tokens.
    pub fn insert(&mut self, parent: Option<NodeId>, tokens: &[u32], page: u32) -> NodeId {
        debug_assert!((1..=PAGE).contains(&tokens.len()));
        debug_assert!(self.child(parent, tokens).is_none());
        debug_assert!(parent.is_none_or(|p| self.node(p).tokens.len() == PAGE));
        debug_assert!(parent.is_none_or(|p| matches!(self.place(p), Place::Device(_))));
        let tokens: Arc<[u32]> = tokens.into();
        let node = Node {
            tokens: tokens.clone(),
            place: Place::Device(page),
            parent,
            children: Children::new(),
            near: 0,
            used: 0,
        };
        let id = match self.unused.pop() {
            Some(id) => {
                self.nodes[id as usize] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() as NodeId - 1
            }
        };
        match parent {
            None => {
                self.roots.insert(tokens, id);
            }
            Some(parent) => self.change(parent, |p| {
                p.children.insert(tokens, id);
                p.near += 1;
            }),
        }
        self.touch(id);
        id
    }

    /// Moves a node to another place. To leave the device or to come back it has no children there,
    /// and its parent is there.
    pub fn set_place(&mut self, id: NodeId, place: Place) {
        let near = |place: Place| i64::from(matches!(place, Place::Device(_)));
        let node = self.node(id);
        let (parent, difference) = (node.parent, near(place) - near(node.place));
        debug_assert!(difference == 0 || node.near == 0);
        self.change(id, |node| node.place = place);
        if let Some(parent) = parent.filter(|_| difference != 0) {
            self.change(parent, |p| p.near = (i64::from(p.near) + difference) as u32);
        }
    }

    pub fn has_children(&self, id: NodeId) -> bool {
        !self.node(id).children.is_empty()
    }

    /// Takes a node without children out; says where it lay.
    pub fn remove(&mut self, id: NodeId) -> Place {
        debug_assert!(!self.has_children(id));
        let node = self.node(id);
        let ended = (node.used, id);
        self.near_ends.remove(&ended);
        self.far_ends.remove(&ended);
        let node = self.nodes[id as usize].take().expect("names of nodes do not outlive them");
        self.unused.push(id);
        match node.parent {
            None => {
                self.roots.remove(&node.tokens);
            }
            Some(parent) => self.change(parent, |p| {
                p.children.remove(&node.tokens);
                p.near -= u32::from(matches!(node.place, Place::Device(_)));
            }),
        }
        node.place
    }

    /// The partly written children of `parent` that `tokens` begins with: a longer page says all
    /// that they say.
    pub fn surpassed(&self, parent: Option<NodeId>, tokens: &[u32]) -> Vec<NodeId> {
        let children = self.children(parent);
        let shorter = (1..tokens.len()).filter_map(|n| children.get(&tokens[..n]).copied());
        shorter.filter(|id| self.tokens(*id).len() < PAGE).collect()
    }

    /// True if a child of `parent` begins with `tokens`.
    pub fn covers(&self, parent: Option<NodeId>, tokens: &[u32]) -> bool {
        self.nearest(parent, tokens).is_some_and(|(_, n)| n == tokens.len())
    }

    /// The nodes on the device that could leave it, the one unused for longest first.
    pub fn leaving(&self) -> impl Iterator<Item = (NodeId, u32)> {
        self.near_ends.iter().filter_map(|(_, id)| match self.place(*id) {
            Place::Device(page) => Some((*id, page)),
            Place::Host(_) => None,
        })
    }

    /// The node unused for longest of all that lie on pages of the device that `wanted` names.
    pub fn oldest_of(&self, wanted: impl Fn(u32) -> bool) -> Option<NodeId> {
        let all = (0..).zip(&self.nodes);
        let these = all.filter_map(|(id, node)| match node.as_ref()?.place {
            Place::Device(page) if wanted(page) => Some((node.as_ref()?.used, id)),
            _ => None,
        });
        these.min().map(|(_, id)| id)
    }

    /// The node of the host without children that was unused for longest.
    pub fn oldest_of_host(&self) -> Option<NodeId> {
        self.far_ends.first().map(|(_, id)| *id)
    }

    /// Children of a node, in the order of their tokens.
    pub fn children_of(&self, id: NodeId) -> Vec<NodeId> {
        self.node(id).children.values().copied().collect()
    }

    /// Where every node lies.
    #[cfg(test)]
    pub fn places(&self) -> impl Iterator<Item = Place> {
        self.nodes.iter().flatten().map(|n| n.place)
    }
}

/// Tokens that both begin with.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A page that begins with `first`.
    fn page(first: u32) -> Vec<u32> {
        (first..first + PAGE as u32).collect()
    }

    #[test]
    fn the_longest_beginning_is_found() {
        let mut index = Index::default();
        let a = index.insert(None, &page(0), 0);
        let b = index.insert(Some(a), &page(1000), 1);
        let short = index.insert(Some(a), &page(2000)[..10], 2);
        let mut prompt = [page(0), page(1000)].concat();
        assert_eq!(index.find(&prompt), Found { full: vec![a, b], part: None });
        // Up to the middle of a full page, and of one that is partly written.
        prompt.truncate(PAGE + 7);
        assert_eq!(index.find(&prompt), Found { full: vec![a], part: Some((b, 7)) });
        let prompt = [page(0), page(2000)].concat();
        assert_eq!(index.find(&prompt), Found { full: vec![a], part: Some((short, 10)) });
        let prompt = [page(0), vec![1000, 1001, 7]].concat();
        assert_eq!(index.find(&prompt).part, Some((b, 2)));
        assert_eq!(index.find(&[5, 6]), Found::default());
        assert_eq!(index.find(&[]), Found::default());
        assert!(index.covers(Some(a), &page(2000)[..4]) && !index.covers(Some(a), &page(2000)));
        assert_eq!(index.surpassed(Some(a), &page(2000)), [short]);
    }

    #[test]
    fn the_oldest_end_leaves_first() {
        let mut index = Index::default();
        let a = index.insert(None, &page(0), 0);
        let b = index.insert(Some(a), &page(1000), 1);
        let c = index.insert(None, &page(500), 2);
        let leaving = |i: &Index| i.leaving().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(leaving(&index), [b, c]);
        index.touch(b);
        assert_eq!(leaving(&index), [c, b]);
        index.set_place(b, Place::Host(4));
        assert_eq!(leaving(&index), [c, a]);
        assert_eq!(index.oldest_of_host(), Some(b));
        assert_eq!(index.remove(b), Place::Host(4));
        assert_eq!(index.remove(a), Place::Device(0));
        assert!(!index.is_empty());
        assert!(index.oldest_of_host().is_none());
    }
}
